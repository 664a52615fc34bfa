"""The arguments of transformers' models, in calls written for those: the error says what to pass instead."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import ParamSpec, TypeVar

Given = ParamSpec("Given")
Result = TypeVar("Result")

_TOKENS = {
    "input_ids": "pass tokens, the first argument",
    "attention_mask": "pass key_padding_mask, bool [B, T], True for real tokens",
}
_FORWARD = _TOKENS | {
    "output_hidden_states": "model.hidden_states(tokens) gives them by layer",
    "labels": "model.loss(tokens, targets) gives the loss, and shifts nothing",
}
ENCODER = _FORWARD | {"token_type_ids": "pass token_types"}
LANGUAGE_MODEL = _FORWARD | {
    "past_key_values": "pass cache, which model.make_cache(batch_size) makes",
    "use_cache": "pass cache, which model.make_cache(batch_size) makes",
}
GENERATE = _TOKENS | {
    "do_sample": "temperature=0 is greedy, and any other temperature samples",
    "max_length": "pass max_new_tokens, which does not count the prompt",
    "pad_token_id": "leave it out, rows that have ended are filled up with their stop token",
    "streamer": "pass on_token, which is called with each new column of tokens",
}
LOAD = {
    "torch_dtype": "pass dtype",
    "device_map": "pass device, on which the whole model will be",
    "trust_remote_code": "leave it out, code of a folder is never run",
}


def instead_of(answers: Mapping[str, str]) -> Callable[[Callable[Given, Result]], Callable[Given, Result]]:
    """A decorator: these keyword arguments, which the function does not have, are refused with their answers."""

    def decorate(function: Callable[Given, Result]) -> Callable[Given, Result]:
        @wraps(function)
        def checked(*args: Given.args, **kwargs: Given.kwargs) -> Result:
            for name in kwargs:
                if name in answers:
                    raise TypeError(f"{name} is an argument of transformers; here {answers[name]}")
            return function(*args, **kwargs)

        return checked

    return decorate
