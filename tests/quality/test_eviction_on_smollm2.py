"""Heavy hitters on real text: 20% of 384 tokens, against a window with sinks of equal bytes, and against chance."""

from kvlab import evaluate
from kvlab.pretrained import sample_text
from kvlab.quality import table

TOKENS = 384
BUDGET = TOKENS // 5


def test_heavy_hitters_beat_a_window_of_equal_bytes_and_chance_and_need_recent_tokens(smollm2):
    """H2O (arXiv 2306.14048), over the tokens past the budget. Scores and positions are paid for: the window holds as
    many tokens more. Without recent tokens and without grace a new token goes at once, and the text is garbage."""
    model, tokenizer = smollm2
    ids = tokenizer.encode(sample_text())[:TOKENS]
    one = 2 * model.config.head_dim * 4  # a head's key and value of a token
    window = BUDGET * (one + 8) // one - 4
    heavy = {"budget": BUDGET}
    caches = {
        "heavy": ("heavy_hitter", heavy),
        "random": ("random", heavy),
        "window + 4": ("sliding", {"window": window, "sinks": 4}),
    }
    found = evaluate(model, ids, {"full": "full"} | caches, progress=False)
    short = evaluate(model, ids[: 2 * BUDGET], {"none safe": ("heavy_hitter", heavy | {"recent": 0})}, progress=False)
    print("\n" + table(found | short))
    late = {name: result.after(BUDGET) for name, result in found.items()}
    print(table(late))
    per_token = model.config.kv_bytes_per_token(4)
    assert 0 <= found["heavy"].nbytes - found["window + 4"].nbytes < per_token
    assert late["full"].perplexity < late["heavy"].perplexity < late["window + 4"].perplexity
    assert late["heavy"].versus(late["random"]).high < 1
    same = found["heavy"].nll[:, BUDGET : 2 * BUDGET - 1].mean().exp()
    assert short["none safe"].after(BUDGET).perplexity > 5 * same
