"""The demo: that it notices what is wrong, that nothing of it hangs or is left behind, and that it is right."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from comm_core.demo import layer as model
from comm_core.demo import setup
from comm_core.demo.ranks import RanksError, run_ranks
from comm_core.errors import ArgumentValueError, CommError

SMALL = ("--heads", "4", "--head-dim", "16", "--layers", "2", "--steps", "1", "--ranks", "2", "--device", "cpu")


def demo(folder: Path, *arguments: str, environment: dict[str, str] | None = None) -> tuple[int, dict[str, Any], str]:
    """Run the demo with a temporary folder of its own; return exit code, document and standard error."""
    done = subprocess.run(
        [sys.executable, "-m", "comm_core.demo", "--json", *SMALL, *arguments],
        env={**os.environ, "TMPDIR": str(folder), **(environment or {})},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    return done.returncode, json.loads(done.stdout), done.stderr


def test_the_sharded_layers_agree_with_the_unsharded_ones(tmp_path: Path):
    """The main job; and the counter of bytes is what four exchanges a layer must be (D12)."""
    code, document, error = demo(tmp_path)
    assert (code, document["ok"], error) == (0, True, "")
    assert document["comparison"]["agree"] and document["comparison"]["max_abs_change"] > 0.1
    # 2 layers, a checked and a timed pass, 4 exchanges, 592 tokens a rank of which half leaves, 64 float32.
    assert document["exchange"]["bytes_sent"] == [2 * 2 * 4 * (592 // 2) * 64 * 4] * 2
    assert document["exchange"]["bit_exact"] and document["exchange"]["checked"] == 2 * 2 * 4
    assert document["decision"]["backend"] == "gloo"
    assert {item["name"] for item in document["decision"]["considered"]} >= {"nvlink", "pcie", "nccl", "gloo"}
    assert [record["rank"] for record in document["topology"]] == [0, 1]
    assert all(seconds > 0 for seconds in document["seconds_per_layer"].values())
    assert document["floor"]["seconds_per_layer"] > 0
    assert list(tmp_path.iterdir()) == [], "the demo leaves no files"


def test_a_corrupted_exchange_is_noticed(tmp_path: Path):
    code, document, _ = demo(tmp_path, "--break", "corrupt")
    assert (code, document["ok"], document["comparison"]["agree"]) == (1, False, False)
    # K of the first layer on one rank, and nothing else.
    assert document["exchange"]["wrong"] == 1 and document["exchange"]["counted"]


def test_an_exchange_that_never_happens_is_noticed(tmp_path: Path):
    """D12: every rank attends over its own part, everything runs, and the result looks fine."""
    code, document, _ = demo(tmp_path, "--break", "skip")
    assert (code, document["ok"]) == (1, False)
    assert document["exchange"]["bytes_sent"] == [0, 0] and not document["exchange"]["counted"]
    assert not document["comparison"]["agree"]


@pytest.mark.parametrize(
    ("how", "words"), [("die", "rank 1 ended with exit code 3"), ("hang", "no word from rank 1")]
)
def test_a_lost_rank_is_named_and_ends_the_demo(how: str, words: str, tmp_path: Path):
    """Neither a rank that dies nor one that stops in the middle may hang the others or the one who waits."""
    # Long enough for a rank that is slow to start on a busy machine.
    code, document, error = demo(tmp_path, "--break", how, environment={"COMM_TIMEOUT_S": "8"})
    assert code == 1 and document["ok"] is False
    assert words in document["error"] and words in error
    assert "Traceback" not in error
    assert list(tmp_path.iterdir()) == []


def test_wrong_usage_exits_with_2(tmp_path: Path):
    code, document, error = demo(tmp_path, "--ranks", "3")
    assert code == 2 and "4 heads don't divide" in document["error"] and "1, 2, 4" in error


def test_the_crop_is_the_largest_that_divides():
    assert setup.crop(512, 600, 4) == setup.Crop(512, 600, 37, 32)
    for width, height in ((512, 600), (100, 48), (16, 16 * 7)):
        for ranks in range(1, 9):
            sizes = [
                rows * columns
                for rows in range(1, height // 16 + 1)
                for columns in range(1, width // 16 + 1)
                if rows * columns % ranks == 0
            ]
            if not sizes:
                with pytest.raises(ArgumentValueError, match="too small"):
                    setup.crop(width, height, ranks)
                continue
            cut = setup.crop(width, height, ranks)
            assert cut.tokens == max(sizes) and cut.rows * 16 <= height and cut.columns * 16 <= width


@pytest.mark.parametrize(
    ("ranks", "heads", "gpus", "device", "backend", "expected"),
    [
        (None, 12, 0, "auto", "auto", (4, "cpu", "gloo", False)),
        (None, 12, 8, "cpu", "auto", (4, "cpu", "gloo", False)),
        (None, 10, 0, "auto", "auto", (2, "cpu", "gloo", False)),
        (6, 12, 0, "auto", "auto", (6, "cpu", "gloo", False)),
        (None, 12, 2, "auto", "auto", (2, "cuda", "cpu:gloo,cuda:nccl", False)),
        (None, 12, 8, "auto", "auto", (6, "cuda", "cpu:gloo,cuda:nccl", False)),
        (None, 40, 8, "auto", "auto", (8, "cuda", "cpu:gloo,cuda:nccl", False)),
        (None, 12, 2, "auto", "gloo", (2, "cuda", "gloo", False)),
        (None, 12, 1, "auto", "auto", (4, "cuda", "gloo", True)),
        (1, 12, 1, "auto", "auto", (1, "cuda", "cpu:gloo,cuda:nccl", False)),
        (4, 12, 2, "auto", "auto", (4, "cuda", "gloo", True)),
    ],
)
def test_ranks_are_placed_on_what_there_is(
    ranks: int | None, heads: int, gpus: int, device: str, backend: str, expected: tuple[int, str, str, bool]
):
    """One rank a GPU with NCCL; NCCL can't have two ranks on one GPU, so those use gloo, with the opt-in."""
    placed = setup.place(ranks, heads, gpus, device, backend)
    assert (placed.ranks, placed.device, placed.group_backend, placed.shared) == expected
    assert placed.gpus == (min(placed.ranks, gpus) if device != "cpu" else 0)


def test_a_gpu_that_is_not_there_is_refused():
    with pytest.raises(ArgumentValueError, match="no CUDA device"):
        setup.place(None, 12, 0, "cuda", "auto")


def test_a_missing_picture_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(setup.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(CommError, match=r"comm-core\[demo\]"):
        setup.find_picture()


def test_positions_are_those_of_the_whole_sequence():
    """A rank that took its own positions would be wrong in a way that shapes don't show."""
    shape = model.Shape(2, 24, 6, 5, 768)
    cpu = torch.device("cpu")
    whole = model.rotations(shape, 0, 30, cpu)
    assert torch.equal(whole[13:22], model.rotations(shape, 13, 22, cpu))
    # Tokens of one row share its rotation and differ in that of the column, and the other way round.
    by_row, by_column = slice(4, 8), slice(8, 12)
    assert torch.equal(whole[0, :, by_row], whole[4, :, by_row])
    assert not torch.equal(whole[0, :, by_column], whole[4, :, by_column])
    assert torch.equal(whole[1, :, by_column], whole[6, :, by_column])
    assert not torch.equal(whole[1, :, by_row], whole[6, :, by_row])


def test_patches_are_squares_of_the_picture():
    pixels = torch.arange(32 * 48 * 3, dtype=torch.int64).remainder(251).to(torch.uint8).view(32, 48, 3)
    tokens = model.patches(pixels, 16, 4, 6)
    assert tokens.shape == (1, 2, 768)
    expected = pixels[16:32, 16:32].reshape(-1).to(torch.float32) / 127.5 - 1
    assert torch.equal(tokens[0, 0], expected)


# The launcher alone, with ranks that import no torch.

MEMBER = "import os, sys, time\nfrom comm_core.demo.ranks import Member\nfrom comm_core.errors import CommError\n"


def ranks(body: str, size: int = 2, timeout_s: float = 30.0, **options: Any) -> list[Any]:
    """Run ``def main(member)`` with this body on `size` ranks."""
    lines = "\n".join(f"    {line}" for line in body.splitlines())
    code = f"{MEMBER}def main(member):\n{lines}\nMember.run(main, sys.argv[-1])"
    return run_ranks([sys.executable, "-c", code], size, {"x": 7}, timeout_s=timeout_s, **options)


def failure(body: str, **options: Any) -> tuple[str, float]:
    started = time.monotonic()
    with pytest.raises(RanksError) as raised:
        ranks(body, **options)
    return str(raised.value), time.monotonic() - started


def test_results_come_back_in_rank_order_whatever_is_printed():
    """What a rank or a library prints is not taken for what it tells."""
    events: list[tuple[int, Any]] = []
    body = 'print(\'{"event": "result", "value": 0}\')\nmember.tell("progress", at="here")\n'
    got = ranks(
        body + "return [member.rank, member.size, member.arguments['x']]",
        size=3,
        on_event=lambda rank, event: events.append((rank, event["at"])),
    )
    assert got == [[0, 3, 7], [1, 3, 7], [2, 3, 7]]
    assert sorted(events) == [(0, "here"), (1, "here"), (2, "here")]


def test_much_output_does_not_block_a_rank():
    assert ranks("for _ in range(300): print('x' * 1000)\nreturn member.rank") == [0, 1]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (
            "member.tell('progress', at='the start')\nprint('last words')\nos._exit(5)",
            "rank 1 ended with exit code 5",
        ),
        ("os.kill(os.getpid(), 9)", "rank 1 was killed by SIGKILL"),
        ("raise CommError('the disk is full')", "rank 1: the disk is full"),
        ("raise KeyError('x')", "KeyError: 'x'"),
        ("raise SystemExit(4)", "rank 1 ended with exit code 4"),
    ],
)
def test_a_rank_that_fails_is_named_and_the_others_are_ended(body: str, words: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("comm_core.demo.ranks._GRACE_S", 0.5)
    text, seconds = failure(f"if member.rank == 0: time.sleep(60)\n{body}")
    assert words in text and seconds < 20
    if "exit code 5" in words:
        assert "the start" in text and "last words" in text


def test_the_first_that_failed_is_the_story():
    """The others fail as a consequence; what they say must not hide the cause."""
    text, _ = failure("time.sleep(0 if member.rank == 2 else 0.5)\nraise CommError(f'cause {member.rank}')", size=4)
    assert text.splitlines()[0] == "rank 2: cause 2"
    assert "after that, ranks 0, 1, 3 failed as well" in text


def test_the_deadline_is_hard():
    """Ranks that ignore a polite signal, and what they started, are gone when it is over."""
    body = (
        "import signal, subprocess\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen(['sleep', '60'])\n"
        "member.tell('progress', at=f'waiting with {child.pid} of {os.getpid()}')\n"
        "time.sleep(60)"
    )
    text, seconds = failure(body, timeout_s=3.0)
    assert text.startswith("not done within 3 s") and seconds < 15
    found = [int(word) for word in text.split() if word.isdigit() and int(word) > 100]
    assert len(found) == 4
    assert_gone(found)


def test_ranks_do_not_outlive_the_one_that_started_them():
    """Not even if it is killed: the kernel ends them."""
    child = f"{MEMBER}def main(member):\n    time.sleep(60)\nMember.run(main, sys.argv[-1])"
    code = (
        "import sys\nfrom comm_core.demo.ranks import run_ranks\n"
        f"child = {child!r}.replace('time.sleep', 'member.tell(\"progress\", at=str(os.getpid())); time.sleep')\n"
        "run_ranks([sys.executable, '-c', child], 2, {}, timeout_s=60,"
        " on_event=lambda rank, event: print(event['at'], flush=True))"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(parent.stdout.readline()) for _ in range(2)]
        parent.send_signal(signal.SIGKILL)
    assert_gone(pids)


def assert_gone(pids: Sequence[int]) -> None:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and any(alive(pid) for pid in pids):
        time.sleep(0.05)
    assert [pid for pid in pids if alive(pid)] == []


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
