"""Pictures: one theme, one dict per picture (data.py), drawn as SVG, by matplotlib and by plotly; and the explorers."""
