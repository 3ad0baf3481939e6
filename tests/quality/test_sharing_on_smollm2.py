"""Layers that share, on a model that was not trained for it: the figures that notebook 06 tells of, in small."""

import torch

from kvlab import evaluate
from kvlab.pretrained import sample_text
from kvlab.quality import reference, table
from kvlab.sharing import price_of_pairs, price_of_silence, similarity
from kvlab.sharing import table as pair_table

TOKENS = 128  # in one chunk: exact for a cache that neither rounds nor forgets by position


def test_keys_and_values_of_other_layers_are_of_no_use_to_smollm2(smollm2):
    """Every layer writes its values in directions of its own. Pairs of layers that share are worse than guessing; one
    pair alone hurts by how much that layer's attention weighs, and leaving it out hurts less; layer 1 cannot do
    without its own."""
    model, tokenizer = smollm2
    ids = tokenizer.encode(sample_text())[:TOKENS]
    keys, values = similarity(model, ids)
    other = ~torch.eye(len(keys), dtype=torch.bool)
    print(
        f"\nlargest |cosine| between layers: keys {keys[other].abs().max():.2f}, values {values[other].abs().max():.2f}"
    )
    assert values[other].abs().max() < 0.2 and keys[other].abs().max() < 0.6

    full = reference(model, ids, chunk=TOKENS, progress=False)
    found = evaluate(
        model, ids, {"full": "full", "pairs share": "shared"}, chunk=TOKENS, reference=full, progress=False
    )
    print(table(found))
    assert found["pairs share"].nbytes * 2 == found["full"].nbytes
    assert found["pairs share"].perplexity > model.config.vocab_size > 1000 * found["full"].perplexity

    layers = (1, 7, 29)
    shared = price_of_pairs(model, ids, [(i - 1, i) for i in layers], chunk=TOKENS, reference=full, progress=False)
    silent = price_of_silence(model, ids, layers[1:], chunk=TOKENS, reference=full, progress=False)
    print(pair_table(shared + silent))
    by = {p.follower: p.kl for p in shared}
    assert min(by, key=by.get) == 29 and by[1] > 10 * by[7]
    assert all(s.kl < by[s.follower] for s in silent)
