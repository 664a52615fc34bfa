"""One check a term of the proof of certified windows (docs/proof.md): whatever weakens a term fails its check.

A bound that is loose by a factor hides errors of that factor, so these inputs are built along the proof (inputs.py),
until what is skipped comes close to the tolerance; and ingredients.py looks at each step of the proof. `CHECKS` are
run by test_bounds.py as they are, and by mutants.py against the package with an error put in.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps

from tests.ops.bounds import decoding, ingredients, windows
from tests.ops.bounds.inputs import LAYOUTS
from tests.ops.cases import windows_whatever_they_cost


def _always(check: Callable[[], None]) -> Callable[[], None]:
    @wraps(check)
    def run() -> None:
        with windows_whatever_they_cost():
            check()

    return run


CHECKS: dict[str, Callable[[], None]] = {
    check.__name__: _always(check)
    for check in (
        windows.mean_of_near_keys,
        windows.mean_of_near_keys_ahead,
        windows.heads_apart,
        windows.the_side_not_looked_to,
        windows.both_sides,
        windows.nearest_keys,
        windows.nearest_keys_ahead,
        windows.norms_by_block,
        windows.quantile_edges,
        windows.unseen_keys,
        windows.padding_and_packing,
        windows.not_finite,
        windows.decay,
        windows.after_a_large_fall,
        windows.powers,
        decoding.decoding,
        decoding.decoding_at_every_length,
        decoding.decoding_heads,
        decoding.decoding_rounding,
        decoding.decoding_extremes,
        decoding.decoding_decay,
        ingredients.ingredients_large,
        ingredients.rounding,
        ingredients.long_sequences,
        ingredients.ingredients_tiny,
    )
}
CHECKS |= {f"random {name}": partial(windows.random_layout, name) for name in LAYOUTS}
CHECKS |= {f"ingredients {name}": partial(ingredients.ingredients, name) for name in LAYOUTS}
