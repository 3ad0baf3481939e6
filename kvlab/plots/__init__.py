"""Pictures: one theme, one data dict per picture (data.py), drawn by svg.py, figures.py and plotly; and the explorers."""
