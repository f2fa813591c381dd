"""The settings of a run: frozen models, presets and one small loader."""
