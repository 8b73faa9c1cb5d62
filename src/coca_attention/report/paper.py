"""The paper's own figures, for comparison (arXiv 2309.08646v3)."""

# Table 1, training from scratch: perplexity on 100 PG-19 documents, stride 512, training length
# 512. "inf" and "OOM" as printed.
TABLE_1_WINDOWS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
TABLE_1: dict[str, tuple[str, ...]] = {
    "ALiBi": ("18.69", "21.27", "28.20", "35.66", "37.03", "OOM", "OOM"),
    "RoFormer": ("19.66", "411.50", "3276.00", "3026.00", "3028.00", "inf", "inf"),
    "RoFormer + dynamic NTK": (
        "19.66", "22.30", "38.00", "75.75", "138.13", "370.75", "380.75",
    ),
    "CoCA-Slack": ("20.11", "33.47", "69.06", "113.19", "157.38", "141.00", "171.63"),
    "CoCA-Slack + dynamic NTK": (
        "20.11", "20.81", "25.88", "34.16", "55.75", "89.31", "101.13",
    ),
}  # fmt: skip
