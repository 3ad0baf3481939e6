"""What a cache costs in quality: perplexity and KL divergence on real text, and recall of a fact far back."""

from .asking import Recall, recall
from .result import Quality, Spread, bootstrap, table
from .streamed import Reference, evaluate, reference

__all__ = ["Quality", "Recall", "Reference", "Spread", "bootstrap", "evaluate", "recall", "reference", "table"]
