"""What a cluster needs to run the stages: Kubernetes manifests or Slurm scripts.

render.py       what both have in common: checks, the stages' commands, the run's YAML
kubernetes.py   objects: a ConfigMap, an Indexed Job a stage, a Service, a CronJob
slurm.py        scripts: a batch script a stage, and one that submits them
launch.py       starts the processes of training on one node, and ends with their exit code
"""

from __future__ import annotations

from pipeline.jobs.render import render, write

__all__ = ["render", "write"]
