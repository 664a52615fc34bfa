"""`python -m trainshort.integrations.lm_eval`: the command line of lm_eval, with the model `trainshort`.

  python -m trainshort.integrations.lm_eval --model trainshort --model_args folder=bloom-560m,max_length=8192 \\
      --tasks lambada_openai,wikitext
"""

from __future__ import annotations

from lm_eval.__main__ import cli_evaluate

if __name__ == "__main__":
    cli_evaluate()  # Python has imported the package before, and so made the model known
