"""The rendered objects against the schemas that Kubernetes publishes, and what they say."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml

from pipeline.cli import parse_arguments
from pipeline.config import RunConfig, parse
from pipeline.documents import parse_yaml
from pipeline.errors import ConfigError
from pipeline.jobs import render
from pipeline.records import STAGES
from tests.jobs.conftest import Configure

#: The oldest API that has all fields by default, and the newest that the package knows.
VERSIONS = ("1.31", kubernetes_validate.latest_version())

Object = dict[str, Any]
BUCKET: Object = {"jobs": {"image": "eagle3:1", "service_account": "heads"}}
VOLUME: Object = {
    "run": {"uri": "/runs/a b"},
    "jobs": {"image": "eagle3:1", "volume_claim": "runs", "stages": {"train": {"gpus": 8}}},
}
TWO_NODES: Object = {
    "jobs": {
        "image": "eagle3:1",
        "stages": {
            "synth": {"workers": 8, "gpus": 0},
            "features": {"workers": 4},
            "train": {"workers": 2, "gpus": 8, "cpus": 64, "memory_gib": 512},
        },
    }
}


def objects(config: RunConfig) -> dict[str, dict[str, Object]]:
    """Stage → kind → object."""
    files = render(config, "kubernetes")
    assert list(files) == [*(f"{stage}.yaml" for stage in STAGES), "apply.sh"]
    return {
        stage: {each["kind"]: each for each in yaml.safe_load_all(files[f"{stage}.yaml"])}
        for stage in STAGES
    }


def jobs(config: RunConfig) -> dict[str, Object]:
    """Stage → Job."""
    return {stage: kinds["Job"] for stage, kinds in objects(config).items()}


def container(job: Object) -> Object:
    first: Object = job["spec"]["template"]["spec"]["containers"][0]
    return first


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("sections", [BUCKET, VOLUME, TWO_NODES])
def test_objects_follow_the_published_schemas(
    configure: Configure, sections: Object, version: str
) -> None:
    for kinds in objects(configure(**sections)).values():
        for value in kinds.values():
            kubernetes_validate.validate(value, version, strict=True)


def _misspell(job: Object) -> None:
    job["spec"]["backOffLimitPerIndex"] = job["spec"].pop("backoffLimitPerIndex")


def _number_as_text(job: Object) -> None:
    job["spec"]["completions"] = "4"


def _list_missing(job: Object) -> None:
    container(job)["command"] = "eagle3 synth"


def _rule_without_action(job: Object) -> None:
    del job["spec"]["podFailurePolicy"]["rules"][0]["action"]


@pytest.mark.parametrize("fault", [_misspell, _number_as_text, _list_missing, _rule_without_action])
def test_the_schemas_catch_faults(configure: Configure, fault: Callable[[Object], None]) -> None:
    job = jobs(configure())["synth"]
    fault(job)
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, VERSIONS[0], strict=True)


#: What YAML 1.1 or 1.2 reads as something else than text, where nothing quotes it.
NOT_TEXT = ("no", "null", "true", "y", "1e3", "0x1f", "12", "1.5", "2024-01-01")


@pytest.mark.parametrize("word", NOT_TEXT)
def test_names_stay_texts(configure: Configure, word: str) -> None:
    names = {"image": word, "service_account": word, "volume_claim": word}
    config = configure(run={"uri": f"/runs/{word}"}, jobs=names)
    for job in jobs(config).values():
        kubernetes_validate.validate(job, VERSIONS[0], strict=True)
        pod = job["spec"]["template"]["spec"]
        assert isinstance(job["metadata"]["labels"]["app.kubernetes.io/instance"], str)
        claims = [each.get("persistentVolumeClaim", {}) for each in pod["volumes"]]
        assert pod["serviceAccountName"] == word and {"claimName": word} in claims
        assert pod["containers"][0]["image"] == word


@pytest.mark.parametrize(
    "odd",
    [
        'it\'s: {odd} "quoted" # and\nlong',
        "$(id) `id` ${HOME} {{ jobs }} {% raw %} %x",
        "a\u2028b\u2029c\x85d\ufeffe\U0001f600 \t ü",
        "- leading\n  - deeper\n\n\ttab \n--- \n...\n",
        " blank at both ends ",
    ],
)
def test_pods_run_the_configuration_that_was_rendered(configure: Configure, odd: str) -> None:
    config = configure(synth={"system_prompt": odd}, train={"learning_rate": 1e-5}, **BUCKET)
    for kinds in objects(config).values():
        again = parse(parse_yaml(kinds["ConfigMap"]["data"]["run.yaml"]))
        assert again.synth and again.synth.system_prompt == odd
        assert all(again.section_hash(stage) == config.section_hash(stage) for stage in STAGES)
        assert again.run.uri == config.run.uri
        volumes = kinds["Job"]["spec"]["template"]["spec"]["volumes"]
        settings = kinds["ConfigMap"]["metadata"]["name"]
        assert {"name": "config", "configMap": {"name": settings}} in volumes


def test_another_configuration_has_another_config_map(configure: Configure) -> None:
    """It is immutable, and pods of a stage that began before keep theirs."""
    maps = [
        objects(configure(run={"uri": "gs://b/x", "seed": seed}))["synth"]["ConfigMap"]
        for seed in (0, 0, 1)
    ]
    first, same, other = (each["metadata"]["name"] for each in maps)
    assert first == same != other


def test_jobs_shape_no_output(configure: Configure) -> None:
    one, other = configure(), configure(jobs={"image": "x", "stages": {"synth": {"workers": 9}}})
    assert all(one.section_hash(stage) == other.section_hash(stage) for stage in STAGES)


@pytest.mark.parametrize("sections", [BUCKET, VOLUME, TWO_NODES])
def test_commands_are_ones_that_eagle3_takes(configure: Configure, sections: Object) -> None:
    for stage, job in jobs(configure(**sections)).items():
        command = container(job)["command"]
        if command[0] == "python":
            assert command[:3] == ["python", "-m", "pipeline.jobs.launch"]
            command = command[command.index("pipeline.cli") :]
        parsed = parse_arguments(command[1:])
        assert parsed.command == stage and parsed.config == "/etc/eagle3/run.yaml"


@pytest.mark.parametrize("stage", ["synth", "features", "eval"])
def test_a_split_target_has_a_process_on_each_gpu(configure: Configure, stage: str) -> None:
    sizes = {stage: {"gpus": 4, "cpus": 32, "workers": 1 if stage == "eval" else 3}}
    sections = {stage: {"parallel": "tensor"}, "jobs": {"stages": sizes}}
    kinds = objects(configure(**sections))[stage]
    command, pod = container(kinds["Job"])["command"], kinds["Job"]["spec"]["template"]["spec"]
    assert command[:3] == ["python", "-m", "pipeline.jobs.launch"]
    assert dict(pairwise(command))["--nproc-per-node"] == "4"
    assert "--standalone" in command and "Service" not in kinds, "workers are groups of their own"
    assert command[command.index("pipeline.cli") + 1] == stage and "run.threads=8" in command
    assert "shm" in {volume["name"] for volume in pod["volumes"]}
    assert action(kinds["Job"], 1) == "FailJob", "who loses the others ends with 75"
    script = render(configure(**sections), "slurm")[f"{stage}.sbatch"]
    assert "--nproc-per-node 4 --standalone --module pipeline.cli " + stage in script


def test_workers_are_pods_of_one_indexed_job(configure: Configure) -> None:
    rendered = jobs(configure(**TWO_NODES))
    for stage, workers in {"synth": 8, "features": 4, "train": 2, "eval": 1}.items():
        spec = rendered[stage]["spec"]
        assert spec["completionMode"] == "Indexed"
        assert spec["completions"] == spec["parallelism"] == workers
    assert "nvidia.com/gpu" not in container(rendered["synth"])["resources"]["limits"]


def test_nodes_of_a_training_meet_at_the_first_pod(configure: Configure) -> None:
    kinds = objects(configure(**TWO_NODES))["train"]
    job, service = kinds["Job"], kinds["Service"]
    name = job["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
    assert job["spec"]["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    command = container(job)["command"]
    options = dict(pairwise(command))
    port = service["spec"]["ports"][0]["port"]
    assert options["--rdzv-endpoint"] == f"{name}-0.{service['metadata']['name']}:{port}"
    assert (options["--nnodes"], options["--nproc-per-node"]) == ("2", "8")
    assert "run.threads=8" in command, "64 cores, eight processes"


#: What each stage's exit code does to its Job; DISRUPTED is a pod whose node went away.
DISRUPTED = "DisruptionTarget"


def action(job: Object, ended: int | str) -> str:
    """Of the first rule that fits, as the Job controller takes it."""
    for rule in job["spec"]["podFailurePolicy"]["rules"]:
        codes = rule.get("onExitCodes", {"values": []})["values"]
        conditions = [pattern["type"] for pattern in rule.get("onPodConditions", [])]
        if ended in codes or ended in conditions:
            return str(rule["action"])
    return "Count"


@pytest.mark.parametrize(
    ("ended", "expected"),
    [
        (1, "FailJob"),
        (2, "FailJob"),
        (75, "Ignore"),
        (130, "Ignore"),
        (137, "Count"),
        (DISRUPTED, "Ignore"),
    ],
)
def test_exit_codes_decide_over_another_attempt(
    configure: Configure, ended: int | str, expected: str
) -> None:
    rendered = jobs(configure(**TWO_NODES))
    assert action(rendered["synth"], ended) == expected
    assert action(rendered["eval"], ended) == expected
    # A process of a training that loses the others ends with 1 too.
    assert action(rendered["train"], ended) == ("Count" if ended == 1 else expected)


def test_pods_have_no_rights_a_secret_and_time_to_end(configure: Configure) -> None:
    pod = jobs(configure())["features"]["spec"]["template"]["spec"]
    assert pod["restartPolicy"] == "Never", "the API wants it beside a podFailurePolicy"
    assert pod["terminationGracePeriodSeconds"] > 120
    assert pod["securityContext"]["runAsNonRoot"] and not pod["automountServiceAccountToken"]
    security = pod["containers"][0]["securityContext"]
    assert security["readOnlyRootFilesystem"] and not security["allowPrivilegeEscalation"]
    assert {"name": "EAGLE3_LOG", "value": "json"} in pod["containers"][0]["env"]
    assert pod["containers"][0]["envFrom"] == [{"secretRef": {"name": "eagle3", "optional": True}}]


def test_run_on_a_volume_is_mounted_where_its_uri_says(configure: Configure) -> None:
    pod = jobs(configure(**VOLUME))["train"]["spec"]["template"]["spec"]
    assert {"name": "run", "persistentVolumeClaim": {"claimName": "runs"}} in pod["volumes"]
    mounts = {mount["name"]: mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
    assert mounts["run"] == "/runs" and mounts["shm"] == "/dev/shm"
    assert pod["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 8


@pytest.mark.parametrize(
    ("sections", "where"),
    [
        ({"jobs": {"image": None}}, "jobs.image"),
        ({"run": {"uri": "runs/x"}, "jobs": {"volume_claim": "runs"}}, "run.uri"),
        ({"run": {"uri": "/data/x"}}, "run.uri"),
        ({"run": {"shard": "0/2"}}, "run.shard"),
        ({"run": {"force": True}}, "run.force"),
        ({"eval": {"parallel": "tensor"}}, "jobs.stages.eval.gpus"),
    ],
)
def test_what_jobs_could_not_run_is_refused(
    configure: Configure, sections: Object, where: str
) -> None:
    with pytest.raises(ConfigError, match=rf"^{where}: "):
        render(configure(**sections), "kubernetes")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("image", "two words"),
        ("volume_claim", "../x"),
        ("service_account", "x: y"),
        ("stages", {"eval": {"workers": 2}}),
        ("stages", {"synth": {"workers": 0}}),
        ("images", "x"),
        ("namespace", "ml"),
    ],
)
def test_bad_values_are_refused(configure: Configure, key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=r"jobs"):
        configure(jobs={key: value})


@pytest.mark.parametrize(
    ("uri", "name"),
    [
        ("gs://bucket/heads/Llama_3.1/", "llama-3-1-synth"),
        ("gs://bucket/70b", "run-70b-synth"),
        ("gs://bucket/…", "eagle3-synth"),
    ],
)
def test_jobs_are_named_after_the_run(configure: Configure, uri: str, name: str) -> None:
    job = jobs(configure(run={"uri": uri}))["synth"]
    assert job["metadata"]["name"] == name


def test_a_path_that_no_pod_can_mount_is_refused(configure: Configure) -> None:
    config = configure(run={"uri": "/runs:a/x"}, jobs={"volume_claim": "runs"})
    with pytest.raises(ConfigError, match=r"run\.uri: Kubernetes mounts no path with a colon"):
        render(config, "kubernetes")
