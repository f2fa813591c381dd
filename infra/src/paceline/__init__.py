"""Training pipelines that account for their own speed: settings, flows and tasks under one import name."""
