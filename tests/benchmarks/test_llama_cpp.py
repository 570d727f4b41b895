"""The llama.cpp contestant runs a stand-in for its programs: what is asked of them, what is made of it."""

import argparse
import json
import sys
from contextlib import closing
from pathlib import Path

import pytest

from benchmarks.contestants.llama_cpp import (
    PLAIN,
    SPECULATIVE,
    LlamaServer,
    export_gguf,
    quantise_gguf,
)
from benchmarks.pairs import Pair
from benchmarks.peers import gguf_files
from benchmarks.synthetic_pair import PAIRS, save_pair
from tests.benchmarks.conftest import Benchmark

# Says token 7 over and over, and that 3 of 5 drafts were accepted if it has a draft.
SERVER = """\
#!{python}
import json, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

if "--help" in sys.argv:
    print("--spec-draft-n-max N")
    sys.exit()
kind = "speculative" if "--model-draft" in sys.argv else "plain"
(Path(__file__).parent / kind).write_text(" ".join(sys.argv))

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer({{"status": "ok"}})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        timings = {{"draft_n": 5, "draft_n_accepted": 3}} if "--model-draft" in sys.argv else {{}}
        assert body["ignore_eos"] and not body["cache_prompt"] and body["temperature"] == 0
        self.answer({{"tokens": [7] * body["n_predict"], "timings": timings}})

    def answer(self, document):
        content = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_):
        pass

HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""
CONVERTER = """\
import json, sys
from pathlib import Path

folder = Path(sys.argv[1])
names = sorted(path.name for path in folder.iterdir())
vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]["vocab"]
Path(sys.argv[sys.argv.index("--outfile") + 1]).write_text(json.dumps([names, len(vocabulary)]))
"""


@pytest.fixture
def llama_cpp(tmp_path: Path) -> Path:
    folder = tmp_path / "llama.cpp"
    folder.mkdir()
    (folder / "llama-server").write_text(SERVER.format(python=sys.executable))
    (folder / "llama-server").chmod(0o755)
    (folder / "convert_hf_to_gguf.py").write_text(CONVERTER)
    return folder


def test_peers_with_llama_cpp_name_what_differs(benchmark: Benchmark, llama_cpp: Path) -> None:
    document = benchmark(
        *("peers", "--pair", "tiny", "--threads", 1, "--max-tokens", 8, "--repeats", 1),
        *("--llama-cpp-bin", llama_cpp, "--llama-cpp-src", llama_cpp),
    )
    rows = {row["variant"]: row for row in document["results"]}
    assert rows[SPECULATIVE]["acceptance_rate"] == 0.6
    assert rows[PLAIN]["acceptance_rate"] is None
    assert (rows[PLAIN]["same_text"], rows[SPECULATIVE]["same_text"]) == ("0/1", "0/1")
    assert [(miss["variant"], miss["prompt"]) for miss in document["misses"]] == [
        (PLAIN, 0),
        (SPECULATIVE, 0),
    ]
    assert all(miss["margin"] > 0 for miss in document["misses"])
    assert "--spec-draft-n-max 5" in (llama_cpp / "speculative").read_text()
    assert "--draft" not in (llama_cpp / "plain").read_text()


def test_a_checkpoint_is_exported_once_with_the_stand_in_tokenizer(llama_cpp: Path, tmp_path: Path) -> None:
    target, _ = save_pair(tmp_path / "pair", 0.8, PAIRS["tiny"])
    (Path(target) / "vocab.json").write_text("another tokenizer's")
    gguf = export_gguf(target, llama_cpp, tmp_path / "gguf" / "target.gguf")
    names, size = json.loads(gguf.read_text())
    assert size == 512
    assert "vocab.json" not in names
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(names)
    (llama_cpp / "convert_hf_to_gguf.py").write_text("raise SystemExit('must not be asked again')")
    assert export_gguf(target, llama_cpp, gguf) == gguf


def test_a_file_is_quantised_once_and_run_with_the_caches_named(llama_cpp: Path, tmp_path: Path) -> None:
    program = llama_cpp / "llama-quantize"
    program.write_text('#!/bin/sh\necho "$3" >"$2"\n')
    program.chmod(0o755)
    (tmp_path / "target.gguf").touch()
    quantised = quantise_gguf(tmp_path / "target.gguf", llama_cpp, "Q4_K_M")
    assert quantised.name == "target-Q4_K_M.gguf"
    assert quantised.read_text() == "Q4_K_M\n"
    program.write_text("#!/bin/sh\necho unknown type >&2; exit 1\n")
    assert quantise_gguf(tmp_path / "target.gguf", llama_cpp, "Q4_K_M") == quantised
    with pytest.raises(RuntimeError, match="unknown type"):
        quantise_gguf(tmp_path / "target.gguf", llama_cpp, "Q9_9")
    with closing(LlamaServer(llama_cpp, quantised, quantised, 5, 1, 64, 9, "f16")):
        options = (llama_cpp / "speculative").read_text()
    for option in ("--cache-type-k", "--cache-type-v", "--spec-draft-type-k", "--spec-draft-type-v"):
        assert f"{option} f16" in options


def test_failures_say_what_the_programs_said(llama_cpp: Path, tmp_path: Path) -> None:
    target, _ = save_pair(tmp_path / "pair", 0.8, PAIRS["tiny"])
    (llama_cpp / "convert_hf_to_gguf.py").write_text("raise SystemExit('no such architecture')")
    with pytest.raises(RuntimeError, match="no such architecture"):
        export_gguf(target, llama_cpp, tmp_path / "target.gguf")
    assert not (tmp_path / "target.gguf").exists()
    (llama_cpp / "llama-server").write_text("#!/bin/sh\necho cannot allocate; exit 1\n")
    with pytest.raises(RuntimeError, match="cannot allocate"):
        LlamaServer(llama_cpp, tmp_path / "target.gguf", None, 5, 1, 64, 9)
    with pytest.raises(FileNotFoundError, match="no llama-server"):
        LlamaServer(tmp_path, tmp_path / "target.gguf", None, 5, 1, 64, 9)


@pytest.mark.parametrize(("draft", "file"), [(None, None), ("self:int8", None), ("d.gguf", Path("d.gguf"))])
def test_a_gguf_file_is_run_as_it_is(draft: str | None, file: Path | None, tmp_path: Path) -> None:
    """Needs no converter; the target's own weights are no file for llama.cpp."""
    pair = Pair("named", "a.GGUF", draft)
    assert gguf_files(argparse.Namespace(), pair, tmp_path) == [Path("a.GGUF"), file]
