"""Writes kvlab/memory/catalog/families.json: what transformers assumes where a config.json is silent.

Run it with the transformers version to read; test_families.py checks that the file still says what it would write.
"""

import dataclasses
import json
import os
import warnings
from pathlib import Path

FILE = Path(__file__).parents[2] / "kvlab" / "memory" / "catalog" / "families.json"
PERIODS = range(1, 13)


def families() -> dict:
    """model_type -> {"role", "defaults", "pattern", "last"}; only what the calculator reads."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    warnings.filterwarnings("ignore")
    import transformers
    from transformers.models.auto import modeling_auto as auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

    from kvlab.memory.spellings import READ

    def mapping(name):
        return set(getattr(auto, f"MODEL_FOR_{name}_MAPPING_NAMES", {}))

    decoders = mapping("CAUSAL_LM")
    both = mapping("SEQ_TO_SEQ_CAUSAL_LM") | mapping("SPEECH_SEQ_2_SEQ")
    wrappers = mapping("IMAGE_TEXT_TO_TEXT") | mapping("MULTIMODAL_LM")
    encoders = mapping("MASKED_LM") | mapping("SEQUENCE_CLASSIFICATION") | mapping("TOKEN_CLASSIFICATION")
    classes, inner = {}, set()
    for name in sorted(CONFIG_MAPPING_NAMES):
        try:
            classes[name] = CONFIG_MAPPING[name]
            nested = classes[name]().to_dict()
        except Exception:  # a class that cannot be made without arguments has no defaults to speak of
            continue
        for key in ("text_config", "decoder", "thinker_config", "talker_config"):
            if isinstance(nested.get(key), dict) and nested[key].get("model_type"):
                inner.add(nested[key]["model_type"])
    out = {"transformers": transformers.__version__, "families": {}}
    for name, cls in classes.items():
        if name not in decoders | both | wrappers | inner | encoders:
            continue
        entry = {}
        declared = {f.name: f.default for f in dataclasses.fields(cls) if f.name in READ}
        keep = (int, bool, str, list)
        entry["defaults"] = {k: v for k, v in declared.items() if isinstance(v, keep) and v != ""}
        switchable = "is_decoder" in {f.name for f in dataclasses.fields(cls)} and name in mapping("MASKED_LM")
        if (name in encoders - decoders - wrappers or switchable) and name not in both:
            entry["role"] = "encoder"
        entry |= pattern(cls)
        out["families"][name] = entry
    return out


def pattern(cls) -> dict:
    """{"pattern": [...]} when the class repeats it over the layers, {"last": kind} when it changes the last one."""
    try:
        types = cls().layer_types
        first = list(types)
    except Exception:
        return {}
    for period in PERIODS:
        try:
            longer = list(cls(num_hidden_layers=len(first) + 2 * period + 1).layer_types)
        except Exception:
            return {}
        expected = [first[i % period] for i in range(len(longer))]
        if longer == expected:
            return {"pattern": first[:period]}
        if longer[:-1] == expected[:-1]:
            return {"pattern": first[:period], "last": longer[-1]}
    return {}


if __name__ == "__main__":
    found = families()
    lines = ",\n".join(f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in found["families"].items())
    FILE.write_text(f'{{"transformers": {json.dumps(found["transformers"])}, "families": {{\n{lines}\n}}}}\n')
    print(len(found["families"]), "families,", FILE.stat().st_size, "bytes")
