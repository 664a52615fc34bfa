"""lm_eval on local tasks: our adapter gives the scores and texts that lm_eval's own adapter for transformers gives.

lm_eval brings many packages, and has an environment of its own: `make test-lm-eval`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lm_eval", reason="needs the package lm_eval: see `make test-lm-eval`")

import transformers
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import CachingLM
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

import trainshort as ts
from tests.models.public.folders import BAICHUAN, MOSAIC, baichuan_tensors, mosaic_tensors, write_folder
from tests.models.public.native import bloom
from tests.models.saved import tiny_tokenizer
from tests.models.small import language_model
from trainshort.integrations.lm_eval import TrainshortLM

pytestmark = pytest.mark.filterwarnings("default")  # those of lm_eval and what it needs are theirs

TEXTS = [
    "The river runs north for nine hundred miles, and then it meets the sea.",
    "A kettle sings; nobody listens. Outside, rain falls on the rails of the old line.",
    "Numbers: 1, 2, 3, 5, 8, 13, 21, 34, 55, 89, 144. Letters: a, b, c.",
    "Wer spät kommt, sieht weniger – so it goes, and so it went.",
    "x",
]
LENGTH = 48  # of the windows: shorter than some texts
TASKS: dict[str, dict[str, Any]] = {
    "choices": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "rolling": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "byte_perplexity"}],
    },
    "continued": {
        "output_type": "generate_until",
        "doc_to_text": "{{text}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["e", " t", "ny"], "max_gen_toks": 12, "do_sample": False},
        "metric_list": [{"metric": "exact_match"}],
    },
}


def make_tokenizer(begin: bool) -> Tokenizer:
    """A BPE on bytes. begin: texts begin with <s>, as some tokenizers have it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = [AddedToken(token, special=True) for token in ("<unk>", "<s>", "</s>", "<pad>")]
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    if begin:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def make_folder(folder: Path, begin: bool = False, **names: str) -> Path:
    """A BLOOM with a tokenizer, as transformers writes it."""
    tokenizer = make_tokenizer(begin)
    model = bloom(6, vocab_size=tokenizer.get_vocab_size(), tie_word_embeddings=False)
    model.generation_config.eos_token_id = 2
    model.save_pretrained(folder)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", **names)
    fast.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=["both", "eos_alone", "begins_with_bos"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    names = {"eos_token": "</s>"} | ({} if request.param == "eos_alone" else {"bos_token": "<s>"})
    return make_folder(tmp_path_factory.mktemp(request.param), request.param == "begins_with_bos", **names)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("plain"), bos_token="<s>", eos_token="</s>")


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of tasks, with their data."""
    home = tmp_path_factory.mktemp("tasks")
    rows = [{"text": text, "answer": "x"} for text in TEXTS] + [{"text": " ".join(TEXTS), "answer": "y"}]
    choices = [
        {"question": TEXTS[0], "choices": [" river", " sea", " the old line of rails", " 144"], "answer": 1},
        {"question": "", "choices": ["The", "A kettle", "Numbers"], "answer": 0},
        {"question": " ".join(TEXTS), "choices": [" a", " b", " c"], "answer": 2},
        {"question": "ends in spaces  ", "choices": ["x", "y z"], "answer": 0},
    ]
    for name, task in TASKS.items():
        data = home / f"{name}.jsonl"
        lines = choices if name == "choices" else rows
        data.write_text("".join(json.dumps(line) + "\n" for line in lines))
        whole = task | {"task": name, "dataset_path": "json", "test_split": "test"}
        whole["dataset_kwargs"] = {"data_files": {"test": str(data)}, "cache_dir": str(home / "cache")}
        (home / f"{name}.yaml").write_text(json.dumps(whole))  # JSON is YAML
    return home


def theirs(folder: Path, **options: Any) -> HFLM:
    return HFLM(str(folder), device="cpu", dtype="float32", max_length=LENGTH, **options)


def ours(folder: Path, **options: Any) -> TrainshortLM:
    return TrainshortLM(folder, **({"device": "cpu", "max_length": LENGTH} | options))


def evaluated(lm: Any, tasks: Path) -> Any:
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    return simple_evaluate(model=lm, tasks=list(TASKS), task_manager=manager, bootstrap_iters=0)


def assert_same_results(found: Any, expected: Any) -> None:
    for name in TASKS:
        numbers = {key: value for key, value in expected["results"][name].items() if isinstance(value, float)}
        assert numbers
        assert {key: found["results"][name][key] for key in numbers} == pytest.approx(numbers, rel=1e-5)
        for one, two in zip(found["samples"][name], expected["samples"][name], strict=True):
            assert one["doc"] == two["doc"]
            assert len(one["resps"]) == len(two["resps"])
            for mine, yours in zip(one["resps"], two["resps"], strict=True):
                assert_same_response(mine[0], yours[0])


def assert_same_response(mine: Any, yours: Any) -> None:
    """A text, a log-probability, or one with whether it is greedy."""
    if isinstance(yours, (list, tuple)):
        assert (mine[0], mine[1]) == (pytest.approx(yours[0], rel=1e-5), yours[1])
    else:
        assert mine == (yours if isinstance(yours, str) else pytest.approx(yours, rel=1e-5))


@lru_cache
def expected_of(folder: Path, tasks: Path) -> Any:
    return evaluated(theirs(folder), tasks)


@pytest.mark.parametrize("batch_size", [1, 3, "auto"])
def test_the_scores_of_the_adapter_for_transformers(folder: Path, tasks: Path, batch_size: int | str) -> None:
    """Empty contexts, texts beyond the length, choices of one and of several tokens."""
    assert_same_results(evaluated(ours(folder, batch_size=batch_size), tasks), expected_of(folder, tasks))


def test_tokens_are_those_of_transformers(folder: Path) -> None:
    one, two = ours(folder), theirs(folder)
    assert (one.eot_token_id, one.prefix_token_id) == (two.eot_token_id, two.prefix_token_id)
    for text in (*TEXTS, "", "<s>already there", "in <s> between</s>"):
        for special in (None, True, False):
            assert one.tok_encode(text, add_special_tokens=special) == two.tok_encode(
                text, add_special_tokens=special
            )


def generation(lm: Any, texts: list[str], **options: Any) -> list[str]:
    requests = [Instance("generate_until", {}, (text, dict(options)), index) for index, text in enumerate(texts)]
    return list(lm.generate_until(requests, disable_tqdm=True))


def test_long_prompts_lose_their_beginning(plain: Path) -> None:
    texts = [" ".join(TEXTS), TEXTS[0], "x"]
    expected = generation(theirs(plain), texts, until=[], max_gen_toks=30)
    assert generation(ours(plain, batch_size=3), texts, until=[], max_gen_toks=30) == expected
    assert len(set(expected)) == 3


def test_what_is_cut_off_is_said_once(plain: Path, caplog: pytest.LogCaptureFixture) -> None:
    lm = ours(plain)
    long = " ".join(TEXTS)
    lm.loglikelihood(
        [Instance("loglikelihood", {}, (text, " a"), 0) for text in (long, "x", long)], disable_tqdm=True
    )
    (said,) = [each.getMessage() for each in caplog.records if each.name.startswith("trainshort")]
    assert "2 requests have more than 48 tokens (max_length 48; the longest has 16" in said
    caplog.clear()
    generation(lm, [long, "x"], max_gen_toks=8)
    (said,) = [each.getMessage() for each in caplog.records if each.name.startswith("trainshort")]
    assert "1 requests have more than 40 tokens" in said


def test_answers_are_kept_for_another_time(plain: Path, tmp_path: Path) -> None:
    """lm_eval's --use_cache: the second time nothing is computed."""
    requests = [Instance("loglikelihood", {}, (text, " and"), 0) for text in TEXTS]
    rolling = [Instance("loglikelihood_rolling", {}, (text,), 0) for text in TEXTS]
    until = [Instance("generate_until", {}, (text, {"until": ["x"], "max_gen_toks": 4}), 0) for text in TEXTS]

    def answers(lm: Any) -> list[Any]:
        return [lm.loglikelihood(requests), lm.loglikelihood_rolling(rolling), lm.generate_until(until)]

    first = answers(CachingLM(ours(plain), str(tmp_path / "answers.db")))
    lm = ours(plain)
    lm.model = None
    assert answers(CachingLM(lm, str(tmp_path / "answers.db"))) == first


def test_texts_that_stop(plain: Path) -> None:
    """Stops of one and of several characters, in the middle of tokens and across them; rows stop one by one."""
    freely = generation(theirs(plain), TEXTS, until=[], max_gen_toks=20)
    for stops in ([freely[0][4:6]], [freely[0][9], freely[1][3:8]], [freely[2][:1]]):
        expected = generation(theirs(plain), TEXTS, until=stops, max_gen_toks=20)
        assert expected != freely
        for rows in (1, 5):
            assert generation(ours(plain, batch_size=rows), TEXTS, until=stops, max_gen_toks=20) == expected


def test_the_token_that_ends_texts_ends_them(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever the first new token is: were it the last of all texts, nothing would be said."""
    lm = ours(plain)
    first = int(lm.model(torch.tensor([lm.tok_encode(TEXTS[0])]))[0, -1].argmax())
    assert generation(lm, TEXTS[:1], until=[], max_gen_toks=5) != [""]
    monkeypatch.setitem(lm.special, "eos", first)
    assert generation(lm, TEXTS[:1], until=[], max_gen_toks=5) == [""]


def test_sampling(plain: Path) -> None:
    lm = ours(plain, batch_size=2)
    options: dict[str, Any] = {"do_sample": True, "temperature": 0.9, "max_gen_toks": 10, "until": []}
    one, two, other = (generation(lm, TEXTS[:2], **options, seed=seed) for seed in (1, 1, 2))
    assert one == two != other
    greedy = generation(lm, TEXTS[:2], max_gen_toks=10)
    assert generation(lm, TEXTS[:2], **options, top_k=1) == greedy
    assert generation(lm, TEXTS[:2], **options | {"do_sample": False}) == greedy
    torch.manual_seed(5)
    first = generation(lm, TEXTS[:2], **options)
    torch.manual_seed(5)
    assert generation(lm, TEXTS[:2], **options, top_p=1.0) == first


def test_one_of_our_own_runs(tmp_path: Path) -> None:
    """Without files beside the tokenizer the end of texts is told by its name."""
    from trainshort.data.tokenizer import ByteTokenizer

    model = language_model(vocab_size=257)
    ts.save(model, tmp_path)
    (tmp_path / "tokenizer.json").write_text(ByteTokenizer().to_str())
    lm = TrainshortLM(tmp_path, device="cpu", max_length=100, dtype=torch.float64)
    assert lm.eot_token_id == lm.prefix_token_id == 256
    assert next(lm.model.parameters()).dtype == torch.float64
    text = "one text, " * 20
    (found,) = lm.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, (text,), 0)], disable_tqdm=True)
    tokens = torch.tensor([[256, *text.encode()]])
    windows = [tokens[:, :101], tokens[:, 100:201]]
    with torch.no_grad():
        losses = [float(model.double().loss(row[:, :-1], row[:, 1:], reduction="sum")) for row in windows]
    assert found == pytest.approx(-sum(losses), rel=1e-12)


def test_memory_that_runs_out(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With "auto" a batch is halved; a number that was asked for is not another."""
    lm = ours(plain, batch_size="auto")
    sizes = []

    def score(parts: list[Any]) -> list[Any]:
        sizes.append(len(parts))
        if len(parts) > 2:
            raise torch.OutOfMemoryError("no more")
        return TrainshortLM._score(lm, parts)

    monkeypatch.setattr(lm, "_score", score)
    requests = [Instance("loglikelihood", {}, (text, " and"), 0) for text in TEXTS]
    expected = ours(plain).loglikelihood(requests, disable_tqdm=True)
    found = lm.loglikelihood(requests, disable_tqdm=True)
    assert [each[0] for each in found] == pytest.approx([each[0] for each in expected])
    assert sizes == [5, 2, 3, 1, 2]
    lm.rows = 3
    with pytest.raises(torch.OutOfMemoryError):
        lm.loglikelihood(requests, disable_tqdm=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pretrained": "bloom"}, "the model trainshort takes folder, .* got pretrained"),
        ({"folder": None}, "folder is missing: --model_args folder=PATH"),
        ({"max_length": 0}, "max_length must be a positive int, got 0"),
        ({"max_length": "long"}, "max_length must be a positive int, got 'long'"),
        ({"batch_size": "auto:4"}, "batch_size must be a positive int or \"auto\", got 'auto:4'"),
        ({"batch_size": 0}, "batch_size must be a positive int"),
        ({"dtype": "int8"}, "dtype must be one of auto, float32"),
        ({"device": "abacus"}, "device must be"),
        ({"prefix_token_id": 9999}, "prefix_token_id must lie in"),
        ({"folder": "nowhere"}, "nowhere: no such folder"),
    ],
)
def test_arguments_that_are_refused(plain: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        TrainshortLM(**({"folder": plain, "device": "cpu"} | options))


def test_folders_that_are_refused(tmp_path: Path) -> None:
    (write_folder(tmp_path / "sp", BAICHUAN, baichuan_tensors()) / "tokenizer.model").write_bytes(b"\x0a")
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json: no such file; .* SentencePiece"):
        ours(tmp_path / "sp")
    write_folder(tmp_path / "encoder", MOSAIC, mosaic_tensors())
    (tmp_path / "encoder" / "tokenizer.json").write_text(tiny_tokenizer().to_str())
    with pytest.raises(ValueError, match="holds an encoder"):
        ours(tmp_path / "encoder")
    ts.save(language_model("learned"), tmp_path / "learned")
    (tmp_path / "learned" / "tokenizer.json").write_text(tiny_tokenizer().to_str())
    assert TrainshortLM(tmp_path / "learned", device="cpu").max_length == 1024
    with pytest.raises(ValueError, match="at most 1024, the number of learned positions"):
        ours(tmp_path / "learned", max_length=1025)
    with pytest.raises(ValueError, match="pass prefix_token_id"):
        _ = ours(tmp_path / "learned").prefix_token_id
    assert ours(tmp_path / "learned", prefix_token_id=3).prefix_token_id == 3
    ts.save(language_model(vocab_size=3), tmp_path / "few")
    (tmp_path / "few" / "tokenizer.json").write_text(tiny_tokenizer().to_str())
    with pytest.raises(ValueError, match="makes token 4 of 'short long'; the model has 3 tokens"):
        ours(tmp_path / "few").tok_encode("short long")


def test_requests_that_are_refused(plain: Path) -> None:
    lm = ours(plain)
    with pytest.raises(ValueError, match="num_beams=4 besides"):
        generation(lm, ["x"], num_beams=4, max_gen_toks=5)
    with pytest.raises(ValueError, match="max_gen_toks must lie between 1 and max_length - 1 "):
        generation(lm, ["x"], max_gen_toks=LENGTH)
    with pytest.raises(ValueError, match="longer than max_length 48: pass a larger max_length"):
        lm.loglikelihood([Instance("loglikelihood", {}, ("x", "y z " * 60), 0)])
    with pytest.raises(ValueError, match="nothing to score"):
        lm.loglikelihood([Instance("loglikelihood", {}, ("x", ""), 0)])
    with pytest.raises(ValueError, match="no chat templates"):
        lm.apply_chat_template([])


def test_the_command_line(plain: Path, tasks: Path, tmp_path: Path) -> None:
    arguments = ["--model", "trainshort", "--model_args", f"folder={plain},max_length={LENGTH}", "--tasks", "choices"]
    options = ["--include_path", str(tasks), "--device", "cpu", "--batch_size", "2", "--output_path", str(tmp_path)]
    line = [sys.executable, "-m", "trainshort.integrations.lm_eval", *arguments, *options]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (file,) = tmp_path.rglob("results_*.json")
    found, expected = json.loads(file.read_text())["results"], expected_of(plain, tasks)["results"]
    for metric in ("acc,none", "acc_norm,none"):
        assert found["choices"][metric] == expected["choices"][metric]


def test_models_of_lm_eval_are_still_known() -> None:
    """lm_eval fills its table only while that is empty: in a process that has seen nothing of it but our adapter."""
    code = (
        "import trainshort.integrations.lm_eval as ours; from lm_eval.api.registry import get_model; "
        "print(get_model('hf').__name__, get_model('trainshort') is ours.TrainshortLM)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["HFLM", "True"]
