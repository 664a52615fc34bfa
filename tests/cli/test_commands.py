"""Evaluate, generate and bench as they are typed."""

from __future__ import annotations

import io
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import trainshort as ts
from tests.cli.run_cli import Outcome, run_cli
from tests.distributed.launched import pretend_launched
from tests.models.small import language_model
from trainshort.cli.generate import Shown, Stream
from trainshort.cli.main import main
from trainshort.cli.stopping import Terminated
from trainshort.data.tokenizer import ByteTokenizer
from trainshort.evaluation import evaluate as evaluate_module

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def run_folder(untrained: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(untrained, tmp_path / "run"))


def test_evaluate_prints_a_table_and_writes_records(capsys: Capture, run_folder: Path) -> None:
    outcome = run_cli(capsys, "evaluate", run_folder, "--lengths", 32, 64, "--tokens", 1000)
    assert outcome.status == 0, outcome.error
    assert "every length scores the same 960 validation tokens, each once" in outcome.out
    records = json.loads((run_folder / "evaluation.json").read_text())["records"]
    assert [each["length"] for each in records] == [32, 64]
    for record in records:
        assert f"{record['perplexity']:,.0f}" in outcome.out
        assert record["bytes"] == 960  # one a token
        assert 0 < record["words"] < 960


@pytest.mark.parametrize("words", [("evaluate",), ("inspect",), ("generate", "--prompt", "a")])
def test_a_folder_of_runs_is_no_run_and_one_is_named(capsys: Capture, run_folder: Path, words: tuple[str]) -> None:
    folder = run_folder.parent
    outcome = run_cli(capsys, *words, folder)
    assert outcome.status == 1
    assert f"a folder with a model in it, not a model: name one of them, such as {run_folder}" in outcome.error
    shutil.copytree(run_folder, folder / "another")
    assert f"a folder of 2 models, not a model: name one of them, such as {folder / 'another'}" in (
        run_cli(capsys, *words, folder).error
    )


def test_evaluate_by_itself_goes_to_sixteen_times_the_length(capsys: Capture, run_folder: Path) -> None:
    assert run_cli(capsys, "evaluate", run_folder).status == 0
    records = json.loads((run_folder / "evaluation.json").read_text())["records"]
    assert [each["length"] for each in records] == [32, 64, 128, 256, 512]


def test_evaluate_recall_prints_a_table_and_writes_records(capsys: Capture, run_folder: Path) -> None:
    words = ("--task", "recall", "--trials", 4, "--choices", 5, "--depths", 0, 100)
    outcome = run_cli(capsys, "evaluate", run_folder, *words)
    assert outcome.status == 0, outcome.error
    assert "20.0%" in outcome.out  # the level of chance
    records = json.loads((run_folder / "recall.json").read_text())["records"]
    tested = [(each["task"], each["length"]) for each in records]
    assert tested == [
        (task, length) for task in ("copy", "passkey") for length in (64, 128, 256, 512)
    ]  # 32: too short
    assert all(len(each["correct"]) == 2 and max(each["correct"]) <= 4 for each in records)
    assert not (run_folder / "evaluation.json").exists()
    assert run_cli(capsys, "evaluate", run_folder, *words, "--lengths", 64, "--seed", 1).status == 0
    assert len(json.loads((run_folder / "recall.json").read_text())["records"]) == 10


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--task", "recall", "--stride", "8"], "--stride is for --task perplexity"),
        (["--trials", "8"], "--trials is for --task recall"),
        (["--task", "recall", "--lengths", "46"], "lengths for recall must be at least 47"),
        (["--task", "recall", "--depths", "101"], "percentages from 0 to 100"),
        (["--task", "recal"], "did you mean recall"),
        (["--lengths", "1000000"], "too few for windows of 1,000,000 tokens"),
        (["--lengths", "0"], "lengths must be at least 1"),
        (["--lengths", "64", "--stride", "8"], "stride is for mode sliding"),
        (
            ["--lengths", "64", "--mode", "sliding", "--stride", "65"],
            "stride must be at most the shortest length, 64",
        ),
        (["--data", "nowhere"], "nowhere: no such folder"),
        (["--device", "cuda:99"], "cuda"),
        (["--device", "abacus"], "device must be cpu, cuda or cuda:N; got 'abacus'"),
        (["--chunk", "100"], "chunk must be a multiple of 128"),
    ],
)
def test_evaluate_refuses(capsys: Capture, run_folder: Path, words: list[str], message: str) -> None:
    outcome = run_cli(capsys, "evaluate", run_folder, *words)
    assert message in outcome.one_sentence()
    assert not (run_folder / "evaluation.json").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "share windows among them with --context-parallel, or start trainshort evaluate without torchrun"),
        (["--task", "recall"], "would measure everything: start trainshort evaluate without torchrun"),
    ],
)
def test_evaluate_is_not_done_by_each_of_several_processes(
    capsys: Capture, run_folder: Path, words: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    assert message in run_cli(capsys, "evaluate", run_folder, *words).one_sentence()
    monkeypatch.setenv("RANK", "1")
    assert run_cli(capsys, "evaluate", run_folder, *words) == Outcome(2, "", "")
    assert not (run_folder / "evaluation.json").exists()
    assert not (run_folder / "recall.json").exists()


def test_processes_that_share_windows_tell_of_them_like_one_alone(
    capsys: Capture, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here one process is all there are."""
    monkeypatch.setattr("trainshort.common.progress.Lines.due", lambda lines: True)
    pretend_launched(monkeypatch)
    words = ["evaluate", run_folder, "--lengths", 32, 64, "--tokens", 640, "--device", "cpu", "--context-parallel"]
    outcome = run_cli(capsys, *words)
    assert outcome.status == 0, outcome.error
    assert "length 64 (2 of 2): 640 of 640 tokens scored" in outcome.error
    assert "evaluation.json holds these figures" in outcome.out
    assert [each["ranks"] for each in json.loads((run_folder / "evaluation.json").read_text())["records"]] == [1, 1]
    measure, calls = evaluate_module._at_length, [0]

    def losing(*inputs: Any) -> Any:
        calls[0] += 1
        if calls[0] == 2:
            raise RuntimeError("[pair.cc:5] Connection closed by peer [127.0.0.1]:5")
        return measure(*inputs)

    monkeypatch.setattr(evaluate_module, "_at_length", losing)
    told = run_cli(capsys, *words).error.splitlines()[-1]
    assert "a process of this evaluation has ended (rank 0 has lost it); 32 is done and in" in told
    assert told.endswith("; go on with --lengths 64 --tokens 640 and the other flags as they were")
    monkeypatch.setattr("trainshort.training.processes.device_for", lambda name, allowed: torch.device("cuda"))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert "this machine has 1 GPUs, and process 2 found none left" in run_cli(capsys, *words).one_sentence()


def test_evaluate_refuses_what_is_no_run(capsys: Capture, tmp_path: Path, run_folder: Path) -> None:
    assert "no such folder" in run_cli(capsys, "evaluate", tmp_path / "nothing").one_sentence()
    (tmp_path / "empty").mkdir()
    assert "holds no trained model" in run_cli(capsys, "evaluate", tmp_path / "empty").one_sentence()
    training = run_folder / "train.json"
    training.write_text(training.read_text().replace('"data": "', '"data": "/gone'))
    assert "was trained on /gone" in run_cli(capsys, "evaluate", run_folder).one_sentence()
    training.unlink()
    assert "name some with --data" in run_cli(capsys, "evaluate", run_folder).one_sentence()


def test_evaluate_refuses_a_damaged_model(capsys: Capture, run_folder: Path) -> None:
    weights = run_folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    assert "not a whole safetensors file" in run_cli(capsys, "evaluate", run_folder).one_sentence()
    (run_folder / "config.json").write_text("{")
    assert "not valid JSON" in run_cli(capsys, "evaluate", run_folder).one_sentence()


def test_evaluate_refuses_data_with_another_tokenizer(
    capsys: Capture, run_folder: Path, prepared: Path, tmp_path: Path
) -> None:
    other = shutil.copytree(prepared, tmp_path / "other")
    tokenizer = other / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text() + "\n")
    outcome = run_cli(capsys, "evaluate", run_folder, "--data", other)
    assert "another tokenizer" in outcome.one_sentence()


def test_generate_continues_the_prompt(capsys: Capture, run_folder: Path) -> None:
    words = ["generate", run_folder, "--prompt", "Line é", "--max-new-tokens", "20", "--seed", "3"]
    outcome = run_cli(capsys, *words)
    assert outcome.status == 0, outcome.error
    assert outcome.out.startswith("Line é")
    assert len(outcome.out) > len("Line é\n")
    assert run_cli(capsys, *words).out == outcome.out


def test_generate_shows_each_token_as_it_comes(
    capsys: Capture, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []
    monkeypatch.setattr("builtins.print", lambda text="", **_: shown.append(text))
    run_cli(capsys, "generate", run_folder, "--prompt", "Line", "--max-new-tokens", "9", "--temperature", "0")
    assert shown[0] == "Line"
    assert len(shown) == 1 + 9 + 1


@pytest.mark.parametrize("terminal", [True, False])
def test_control_characters_in_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    """They are shown as pictures, and go into files and pipes as they are."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    Shown("a\x1b[2Jb\n\tc", ByteTokenizer()).start()
    assert capsys.readouterr().out == ("a\N{SYMBOL FOR ESCAPE}[2Jb\n\tc" if terminal else "a\x1b[2Jb\n\tc")


def test_characters_are_shown_when_all_their_bytes_are_there() -> None:
    stream = Stream(lambda tokens: bytes(tokens).decode("utf-8", errors="replace"))
    parts = [stream.add(byte) for byte in "aé…b".encode()]
    assert parts == ["a", "", "é", "", "", "…", "b"]
    assert stream.add(0xC3) == ""
    assert stream.rest() == "\N{REPLACEMENT CHARACTER}"


def test_replacement_characters_of_the_text_itself_break_nothing() -> None:
    stream = Stream(lambda tokens: bytes(tokens).decode("utf-8", errors="replace"))
    text = 4 * "\N{REPLACEMENT CHARACTER}" + "\N{GRINNING FACE}b"
    parts = [stream.add(byte) for byte in text.encode()]
    assert "".join(parts) == text
    assert "".join(parts[:12]) == text[:1]  # the others may be bytes of a character yet


def test_bytes_that_never_become_a_character_hold_nothing_up() -> None:
    stream = Stream(lambda tokens: bytes(tokens).decode("utf-8", errors="replace"))
    text = "".join([stream.add(byte) for byte in b"a\xffb\xc3c"]) + stream.rest()
    assert text == b"a\xffb\xc3c".decode("utf-8", errors="replace")


def test_a_long_text_is_decoded_a_short_tail_at_a_time() -> None:
    longest = 0

    def decode(tokens: list[int]) -> str:
        nonlocal longest
        longest = max(longest, len(tokens))
        return bytes(tokens).decode("utf-8", errors="replace")

    for data in ("aé…b\N{GRINNING FACE}".encode() * 50, b"\xff" * 300, b"\xe2\x80" * 200):
        stream = Stream(decode)
        text = "".join([stream.add(byte) for byte in data]) + stream.rest()
        assert text == data.decode("utf-8", errors="replace")
    assert longest <= 70


def test_tokens_that_are_written_otherwise_at_the_start_of_a_text() -> None:
    """As many tokenizers do it: words carry the space before them, and a text begins without one."""
    words = ["▁one", "▁two", "th", "▁three"]
    stream = Stream(lambda tokens: "".join(words[token] for token in tokens).replace("▁", " ").removeprefix(" "))
    assert "".join([stream.add(token) for token in (0, 1, 2, 3, 1)]) + stream.rest() == "one twoth three two"


@pytest.mark.parametrize("stop", [KeyboardInterrupt, Terminated])
def test_generate_without_end_stops_cleanly(
    capsys: Capture, run_folder: Path, monkeypatch: pytest.MonkeyPatch, stop: type[KeyboardInterrupt]
) -> None:
    """What was written stays, with a newline; one line says how fast it was."""
    words = ["generate", run_folder, "--prompt", "Line", "--seed", "3"]
    expected = run_cli(capsys, *words, "--max-new-tokens", 30).out
    add = Shown.add

    def count(self: Shown, column: Tensor) -> None:
        add(self, column)
        if self.count == 30:
            raise stop

    monkeypatch.setattr(Shown, "add", count)
    outcome = run_cli(capsys, *words, "--max-new-tokens", "none", "--speed")
    assert outcome.status == getattr(stop, "status", 130)
    assert outcome.out == expected
    assert outcome.error.endswith(" tokens/s, 30 new tokens, 34 in context\n")
    assert len(outcome.error.splitlines()) == 1


def test_texts_stand_apart(capsys: Capture) -> None:
    shown = Shown("ab", ByteTokenizer())
    for token in (*b"cd", 256, *b"ef", 256):
        shown.add(torch.tensor([token]))
    shown.finish()
    assert capsys.readouterr().out == "abcd\n\nef\n"


def test_generate_says_nothing_but_the_text_to_a_pipe(capsys: Capture, run_folder: Path) -> None:
    assert run_cli(capsys, "generate", run_folder, "--prompt", "Line", "--max-new-tokens", 5).error == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--temperature", "-1"], "temperature must be at least 0"),
        (["--top-p", "2"], "--top-p must lie in (0, 1]"),
        (["--max-new-tokens", "-1"], "--max-new-tokens must be at least 0"),
    ],
)
def test_generate_refuses(capsys: Capture, run_folder: Path, words: list[str], message: str) -> None:
    outcome = run_cli(capsys, "generate", run_folder, "--prompt", "a", *words)
    assert message in outcome.one_sentence()
    assert outcome.out == ""


@pytest.mark.parametrize("text", ["Line é", ""])
def test_generate_nothing_new_shows_the_prompt(capsys: Capture, run_folder: Path, text: str) -> None:
    outcome = run_cli(capsys, "generate", run_folder, "--prompt", text, "--max-new-tokens", 0)
    assert (outcome.status, outcome.out) == (0, text + "\n")


def test_weights_of_several_dtypes_get_one(capsys: Capture, tmp_path: Path) -> None:
    """They stay as they were saved, which torch does not always take."""
    model = language_model(vocab_size=257, qkv_bias=True)
    for weight in model.parameters():
        weight.data = weight.data.bfloat16() if weight.dim() > 1 else weight.data
    model.tokenizer = ByteTokenizer()
    ts.save(model, tmp_path)
    words = ("generate", tmp_path, "--prompt", "a", "--max-new-tokens", 2, "--device", "cpu")
    said = run_cli(capsys, *words).one_sentence()
    assert "dtype" in said
    assert said.endswith("if the weights are of several dtypes, --dtype gives them one")
    assert run_cli(capsys, *words, "--dtype", "float32").status == 0


def standard_input(monkeypatch: pytest.MonkeyPatch, data: bytes) -> None:
    """As Python opens it in a plain locale, where bytes that are no text are taken for surrogates."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8", errors="surrogateescape"))


def test_generate_reads_the_standard_input(
    capsys: Capture, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    standard_input(monkeypatch, "Line é\r\nand".encode())
    outcome = run_cli(capsys, "generate", run_folder, "--prompt", "-", "--max-new-tokens", 0)
    assert (outcome.status, outcome.out) == (0, "Line é\nand\n")


def test_generate_names_a_byte_that_is_no_text(
    capsys: Capture, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    standard_input(monkeypatch, "Line é\r\n".encode() + b"\xff and")
    outcome = run_cli(capsys, "generate", run_folder, "--prompt", "-", "--max-new-tokens", 2)
    assert "the standard input is not UTF-8: byte 0xff at 9 (invalid start byte)" in outcome.one_sentence()
    assert outcome.out == ""


def test_generate_needs_a_tokenizer(capsys: Capture, run_folder: Path) -> None:
    (run_folder / "tokenizer.json").unlink()
    assert "tokenizer.json" in run_cli(capsys, "generate", run_folder, "--prompt", "a").one_sentence()


def test_bench_shows_each_row_as_it_is_measured(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    import trainshort.experiments.bench as module

    measure, shown = module.measure, list[str]()

    def measured(case: module.Case, **more: Any) -> dict[str, Any]:
        shown.append(capsys.readouterr().out)
        return measure(case, **more) | {"waiting": 0.4 if case.length == 200 else 0.0}

    monkeypatch.setattr(module, "measure", measured)
    words = ["bench", "--lengths", 64, 200, "--heads", 2, "--head-dim", 16, "--tokens", 400, "--seconds", 0.01]
    main([str(word) for word in words])
    last = capsys.readouterr().out
    assert "trainshort" in shown[0]  # the heading
    assert "6 x 64" in shown[1]
    assert "loaded" not in shown[1]
    row, *notes = last.splitlines()
    assert "2 x 200" in row
    assert row.endswith("loaded")
    assert "200: measured on a loaded machine: its threads waited for a core 40% of the time" in notes
    assert max(len(line) for line in (shown[1] + last).splitlines()[:-3]) <= 90


def test_bench_prints_a_table_and_writes_figures(capsys: Capture, tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    words = ["--lengths", 64, 200, "--heads", 2, "--head-dim", 16, "--tokens", 400, "--seconds", 0.01]
    outcome = run_cli(capsys, "bench", *words, "--dense-up-to", 100, "--backward", "--out", out)
    assert outcome.status == 0, outcome.error
    records = json.loads(out.read_text())["records"]
    assert [each["batch"] for each in records] == [6, 2]
    assert records[0]["ms"]["dense bias"] > 0
    assert records[1]["ms"]["dense bias"] is None
    assert records[1]["kept"] == 1.0
    for name in ("trainshort", "row bias", "no bias"):
        assert name in outcome.out
        assert records[1]["ms"][name] > 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--lengths", "0"], "lengths must be at least 1"),
        (["--heads", "0"], "heads must be at least 1"),
        (["--seconds", "0"], "seconds must be positive"),
        (["--device", "cuda:99"], "cuda"),
    ],
)
def test_bench_refuses(capsys: Capture, words: list[str], message: str) -> None:
    assert message in run_cli(capsys, "bench", *words).one_sentence()
