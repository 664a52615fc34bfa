"""The report: from the files of runs to one page, figures for a paper and tables. Reads files, never needs torch.

`trainshort.report.build.build_report` is the function to call. Each file does one thing: reading.py takes what is
there and names what is not, methods.py puts seeds together, series.py and heads.py make numbers, charts.py describes
charts for plotly, figures.py draws with matplotlib, page.py makes the page.
"""
