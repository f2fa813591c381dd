"""What a run can be told: frozen models, presets and one small loader. It knows nothing of how a run works."""
