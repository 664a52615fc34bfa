"""The report: from the files of runs to one page, figures for a paper and tables. Reads files, never needs torch.

`trainshort.report.build.build_report` is the function to call. Each file does one thing: reading.py takes what is
there and names what is not, methods.py puts seeds together, series.py and heads.py make numbers, finding.py says in a
sentence what was found, charts.py and the files that end in it describe charts, figures.py draws them with
matplotlib, elements.py and page.py make the page, on which assets/page.js draws them with plotly.
"""
