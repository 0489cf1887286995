"""Answers of a real (tiny) engine, in shards, and a second run that goes on where the first was."""

from __future__ import annotations

import json

import numpy as np
import pytest

from drafters.training.corpus import Corpus
from server.regenerate import main
from tests.engine import real

pytestmark = [pytest.mark.model, pytest.mark.slow]


def test_answers_come_in_shards_and_runs_go_on(tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    entries = [{"id": f"p{i}", "prompt": text, "domain": "chat"} for i, text in enumerate(real.PROMPTS[:9])]
    entries.append({"id": "long", "prompt": "word " * 300, "domain": "chat"})
    prompts.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    known = tmp_path / "known.npz"
    np.savez(known, id=np.array(["p3"]))
    arguments = [
        *(str(prompts), "--output-dir", str(tmp_path / "out"), "--max-tokens", "8", "--max-prompt", "200"),
        *("--shard", "4", "--skip", str(known), "--num-pages", "200", "--threads", "1"),
    ]
    assert main([*arguments, "--limit", "5"]) == 0
    first = Corpus.load(tmp_path / "out")
    assert main(arguments) == 0
    corpus = Corpus.load(tmp_path / "out")
    names = np.concatenate([np.load(file)["id"] for file in sorted((tmp_path / "out").glob("*.npz"))])
    assert sorted(names) == sorted(f"p{i}" for i in range(9) if i != 3)
    assert (corpus.ids[: len(first.ids)] == first.ids).all()
    tokenizer = real.parts("gguf").tokenizer
    for index, name in enumerate(names):
        text = corpus.text(index)
        prompt = real.PROMPTS[int(name[1:])]
        wanted = tokenizer.apply_chat_template([{"role": "user", "content": prompt}])
        assert text[: corpus.prompts[index]].tolist() == list(wanted)
        assert 1 <= len(text) - corpus.prompts[index] <= 8
        if corpus.temperatures[index] == 0.0:
            params = {"temperature": 0.0, "max_tokens": 8}
            assert (
                real.generate([(list(wanted), params)], "off", "gguf")[0][0]
                == text[corpus.prompts[index] :].tolist()
            )
    assert set(corpus.domains) == {"chat"}


def test_what_cannot_be_read_is_said(tmp_path, capsys):
    assert main([str(tmp_path / "none.jsonl"), "--output-dir", str(tmp_path)]) == 1
    assert "none.jsonl" in capsys.readouterr().err
