"""The demo: it runs, its numbers are right, and it fails where it must."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from comm_lowp.demo import command

runner = CliRunner()


@pytest.mark.installed_plugins
def test_the_demo_prints_accuracy_bytes_and_layout():
    done = runner.invoke(
        command.app, ["--ranks", "2", "--heads", "2", "--tokens", "131", "--head-dim", "64", "--json"]
    )
    assert done.exit_code == 0, done.output
    result = json.loads(done.stdout)
    assert result["ok"] and result["identical_to_one_device"] and result["accurate"]
    wire = result["wire_bytes_per_rank"]
    # K14: what is on the wire is counted with scales and padding, beside what 16 bit would be.
    codes = 3 * 66 * 1 * 64
    assert wire["codes"] == codes and wire["sixteen_bit"] == 2 * codes
    assert wire["statistics"] == 4 * 2 * (6 * 64 + 2)
    assert wire["all"] == wire["codes"] + wire["scales"] + wire["padding"] + wire["statistics"]
    for found in result["accuracy"].values():
        assert 0.999 < found["cosine"] <= 1.0 and 0.0 < found["relative_l2"] < 0.03 and found["relative_l1"] > 0.0
    assert result["layout"]["layout"] == "sage2_sm90" and result["layout"]["transport"] == "gloo"


def test_the_text_says_what_the_document_says(monkeypatch):
    document = {}

    def run(options, timeout_s):
        sums = {"dot": 1.0, "x2": 1.0, "y2": 1.0, "l1": 0.5, "y1": 1.0, "d2": 1.0, "tail": 0.0, "finite": 1.0}
        rank = {
            "identical": False,
            "sums": {"exact": sums},
            "bytes_sent": 10,
            "layout": "sage2_sm90",
            "transport": "gloo",
            "statistics_bytes": 4,
            "chunk_bytes": 128,
            "code_bytes": 96,
            "scale_bytes": 16,
            "v_shape": [1, 64, 1, 128],
            "q_scale_shape": [1, 1, 4],
            "k_scale_shape": [1, 1, 1],
            "q_slots": 1,
            "k_slots": 1,
        }
        document.update(command._document(options, [rank, rank]))
        return document

    monkeypatch.setattr(command, "run", run)
    done = runner.invoke(command.app, ["--ranks", "2"])
    assert done.exit_code == 1 and not document["ok"]
    text = " ".join(done.stdout.split())
    assert "DIFFER FROM" in text and "NOT WITHIN" in text and "sage2_sm90" in text and "of 16 bit" in text


@pytest.mark.parametrize("options", [["--heads", "3"], ["--head-dim", "96"], ["--ranks", "0"], ["--layout", "x"]])
def test_options_that_do_not_fit_are_refused(options):
    assert runner.invoke(command.app, options).exit_code == 2


def test_accuracy_is_put_together_from_the_ranks():
    parts = [
        {"dot": 3.0, "x2": 4.0, "y2": 9.0, "l1": 1.0, "y1": 4.0, "d2": 0.0},
        {"dot": 3.0, "x2": 0.0, "y2": 0.0, "l1": 1.0, "y1": 0.0, "d2": 2.25},
    ]
    assert command.accuracy(parts) == {"cosine": 1.0, "relative_l1": 0.5, "relative_l2": 0.5}
