"""Accuracy of associative recall: the most likely token at every answer is the value, or not."""

from collections import defaultdict
from typing import Any

import numpy as np
import torch

from coca_lab.data.recall import recall_text


@torch.inference_mode()
def measure_recall(
    model: Any,
    vocabulary: list[int],
    *,
    length: int,
    pairs: int,
    texts: int,
    seed: int,
    batch_tokens: int = 8192,
) -> dict[str, Any]:
    """Answers asked and right, also by octave of their distance from their pair in tokens.

    A text is read in one pass: what the model says at one answer does not depend on the others.
    """
    every = [
        recall_text(vocabulary, pairs, length, np.random.default_rng([seed, length, pairs, index]))
        for index in range(texts)
    ]
    octaves: dict[int, list[int]] = defaultdict(lambda: [0, 0])
    size = max(1, batch_tokens // length)
    for start in range(0, texts, size):
        batch = every[start : start + size]
        ids = torch.from_numpy(np.stack([text.ids for text in batch])).to(model.device)
        best = model(input_ids=ids, use_cache=False).logits.argmax(-1).cpu().numpy()
        for text, said in zip(batch, best, strict=True):
            hits = said[text.answers - 1] == text.ids[text.answers]
            for distance, hit in zip(text.distances.tolist(), hits.tolist(), strict=True):
                octave = octaves[1 << distance.bit_length() - 1]
                octave[0] += 1
                octave[1] += hit
    counts = {str(octave): octaves[octave] for octave in sorted(octaves)}
    asked, right = (sum(count[i] for count in counts.values()) for i in range(2))
    return {
        "length": length,
        "pairs": pairs,
        "asked": asked,
        "right": right,
        "octaves": counts,
    }
