"""The README's figure: perplexity and passkeys against length, light and dark.

Drawn from results/long-context/results.json: mean and range over three seeds.

    python scripts/readme_figure.py   # writes docs/images/long-context-{light,dark}.svg
"""

import json
from pathlib import Path

import altair as alt
import pandas as pd

ROOT = Path(__file__).parents[1]
MODELS = {  # of the study, their labels and colours (Okabe and Ito's)
    "Roles, rotary": ("layers with roles", "#0072B2"),
    "ALiBi": ("ALiBi", "#E69F00"),
    "CoCA-Strict": ("CoCA (strict)", "#009E73"),
    "RoFormer": ("RoPE", "#D55E00"),
}
TRAINED = 256  # tokens
INKS = {"light": "#24292f", "dark": "#d7dde5"}


def figures() -> pd.DataFrame:
    """One row per model, seed, measure and length."""
    results = json.loads((ROOT / "results/long-context/results.json").read_text())["results"]
    rows = [
        (MODELS[cell["model"]][0], cell["task"], cell.get("window", cell.get("length")),
         cell.get("perplexity", cell.get("accuracy")))
        for cell in results
        if cell["model"] in MODELS and cell["scaling"] == "none"
    ]  # fmt: skip
    return pd.DataFrame(rows, columns=["model", "task", "tokens", "value"])


def panel(data: pd.DataFrame, title: str, scale: alt.Scale, axis: alt.Axis) -> alt.LayerChart:
    """Lines through the means, with the range over the seeds behind them."""
    lengths = sorted(data["tokens"].unique().tolist())
    ticks = alt.Axis(values=lengths, format=",d", title="tokens read")
    labels, colours = zip(*MODELS.values(), strict=True)
    base = alt.Chart(data, title=alt.Title(title, anchor="start")).encode(
        x=alt.X("tokens:Q", scale=alt.Scale(type="log", base=2, nice=False), axis=ticks),
        color=alt.Color(
            "model:N",
            scale=alt.Scale(domain=labels, range=colours),
            legend=alt.Legend(orient="bottom", title=None, symbolType="stroke", symbolOpacity=1),
        ),
    )
    low, high = alt.Y("min(value):Q", scale=scale, axis=axis), alt.Y2("max(value):Q")
    band = base.mark_area(opacity=0.2).encode(y=low, y2=high)
    mean = alt.Y("mean(value):Q", scale=scale, axis=axis)
    line = base.mark_line(point=alt.OverlayMarkDef(size=45), strokeWidth=2.5).encode(y=mean)
    return (band + line).properties(width=330, height=200)


def chart(ink: str) -> alt.HConcatChart:
    """Both panels, with text and axes in a colour."""
    data = figures()
    perplexity = panel(
        data[data["task"] == "perplexity"],
        "Perplexity (lower is better)",
        alt.Scale(type="log", nice=False, domain=[15, 100]),
        alt.Axis(values=[15, 20, 30, 50, 100], title=None),
    )
    passkeys = panel(
        data[data["task"] == "passkey"],
        "Passkeys found (higher is better)",
        alt.Scale(domain=[0, 1]),
        alt.Axis(format="%", values=[0, 0.25, 0.5, 0.75, 1], title=None),
    )
    text = {"labelColor": ink, "titleColor": ink}
    return (
        alt.hconcat(perplexity, passkeys, spacing=40)
        .configure(background="transparent", font="system-ui, sans-serif")
        .configure_axis(
            **text,
            **{"labelFontSize": 12, "titleFontSize": 12, "titleFontWeight": "normal"},
            **{"gridColor": "#88888833", "domainColor": "#888", "tickColor": "#888"},
        )
        .configure_axisX(grid=False)
        .configure_legend(
            **text, labelFontSize=13, labelLimit=300, columnPadding=30, symbolStrokeWidth=8
        )
        .configure_title(color=ink, fontSize=14)
        .configure_view(stroke=None)
    )


if __name__ == "__main__":
    for theme, ink in INKS.items():
        chart(ink).save(ROOT / "docs" / "images" / f"long-context-{theme}.svg")
