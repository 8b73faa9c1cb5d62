"""The laboratory: training, evaluation, analysis, studies, reports, and the command coca."""
