"""What a model's attention does on real text: the figures of the CoCA paper, a script each.

    python -m studies.angles.figure3 MODEL --source TEXT   # angles Θ, cases, anomalous tokens
    python -m studies.angles.figure7 MODEL --source TEXT   # borders that scores cross (App. D.1)
    python -m studies.angles.bounds MODEL --source TEXT    # Eq. 19 to 21 and the scores (App. D.2)
    python -m studies.angles.shifts MODEL --source TEXT    # how relative scores are (App. D.4)

docs/analysis.md describes what is measured. They run in a clone, with PYTHONPATH=.
"""
