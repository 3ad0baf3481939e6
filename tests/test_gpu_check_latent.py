"""The GPU check's part on latent attention, tiny and on the CPU: it passes, and fails for a wrong scale or byte."""

import torch

from kvlab.caches import FullCache
from kvlab.gpu_check import latent
from kvlab.mla import LatentAttention

CPU = torch.device("cpu")


def run(*dtypes):
    with torch.no_grad():
        return list(latent.check_latent(CPU, dtypes, "tiny"))


def failed(checks):
    return {c.name for c in checks if not c.ok}


def test_both_forms_pass_in_every_dtype():
    checks = run(torch.float32, torch.bfloat16)
    assert not failed(checks), [c for c in checks if not c.ok]
    assert {c.part for c in checks} == {"latent attention, float32", "latent attention, bfloat16"}
    names = {c.name for c in checks}
    for form in ("absorbed", "expanded"):
        assert names >= {f"{form}, no cache", *(f"{form}, {v.name}" for v in latent.CACHES)}


def test_a_wrong_scale_of_one_form_fails(monkeypatch):
    right = LatentAttention.absorbed

    def wrong(self, q_nope, q_rope, *rest):  # the scale of the width that the query has
        factor = (self.config.kv_lora_rank + self.config.qk_rope_head_dim) ** -0.5 / self.scale
        return right(self, q_nope * factor, q_rope * factor, *rest)

    monkeypatch.setattr(LatentAttention, "absorbed", wrong)
    checks = run(torch.float32)
    assert failed(checks) == {
        "absorbed, no cache",
        "absorbed, paged",
        "absorbed, sliding + sinks",
    }  # int8 may be off more


def test_bytes_that_are_not_the_formula_fail(monkeypatch):
    right = FullCache.nbytes_by
    monkeypatch.setattr(FullCache, "nbytes_by", lambda self: right(self) | {"more": 1})
    assert failed(run(torch.float32)) == {"bytes of a full cache"}
