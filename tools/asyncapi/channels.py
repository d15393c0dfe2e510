"""The subjects and their messages: the table from which the document is made. Parameters are written `{name}`."""

import inspect
from typing import NamedTuple

from bus.messages import catalog, events, fleet, flow, jobs, public, quality, scaling, verbs, work
from bus.subjects import Subjects

NAMES = Subjects()


class Channel(NamedTuple):
    """One subject. action: what the system does there, as AsyncAPI means it. reply: what comes back to the sender's inbox."""

    key: str
    address: str
    messages: tuple[type, ...]
    action: str
    summary: str
    reply: tuple[type, ...] = ()
    tag: str = "public"


def public_channels() -> list[Channel]:
    """Channels for outsiders."""
    refusal = public.Refusal
    return [
        Channel(
            "query",
            NAMES.query("{app}"),
            (public.QueryHead,),
            "receive",
            "An online query. With the app `_` and a model: a query by registered model without an app.",
            (public.Answer, refusal),
        ),
        Channel(
            "cancel",
            NAMES.cancel("{app}"),
            (public.CancelQuery,),
            "receive",
            "A client takes a query back: it is not computed if it has not begun.",
            (public.QueryCancelled, refusal),
        ),
        Channel(
            "feedback",
            NAMES.feedback("{app}"),
            (public.Feedback,),
            "receive",
            "What an answer should have been, by the query's id or its inputs; the reply comes once it is on disk.",
            (public.Accepted, refusal),
        ),
        Channel(
            "explain",
            NAMES.explain("{app}"),
            (public.Requirements,),
            "receive",
            "The decision that a query with these requirements would get now; no query runs.",
            (public.Explanation, refusal),
        ),
        Channel(
            "list",
            NAMES.list("{what}"),
            (public.ListRequest,),
            "receive",
            "Lists of apps, models, variants, workers, pipelines or jobs.",
            (public.Listing, refusal),
        ),
        Channel(
            "register",
            NAMES.register(),
            (public.Register,),
            "receive",
            f"Register a model whose files lie in the object store bucket {NAMES.uploads_bucket}.",
            (public.RegistrationAccepted, refusal),
        ),
        Channel(
            "registration",
            NAMES.registration("{registration}"),
            (public.RegistrationStatus,),
            "send",
            "Progress of a registration until it is done, failed or cancelled; a request there answers with the last status.",
        ),
        Channel(
            "registration-cancel",
            NAMES.registration_cancel("{registration}"),
            (public.CancelRegistration,),
            "receive",
            "Cancel a registration: no more is built, and nothing of it is kept.",
            (public.RegistrationCancelled, refusal),
        ),
        Channel(
            "job",
            NAMES.job("{app}"),
            (jobs.SubmitJob,),
            "receive",
            "An offline job: every item of a file or object is computed once, the outputs are written in the same order.",
            (jobs.JobAccepted, refusal),
        ),
        Channel(
            "job-status",
            NAMES.job_status("{job}"),
            (jobs.JobStatus,),
            "send",
            "Progress of a job until it is done, failed or cancelled; a request there answers with the last status.",
        ),
        Channel(
            "job-cancel",
            NAMES.job_cancel("{job}"),
            (jobs.CancelJob,),
            "receive",
            "Cancel a job: its remaining items are not computed.",
            (jobs.JobCancelled, refusal),
        ),
        *(
            Channel(
                f"admin-{verb}",
                NAMES.admin(verb),
                (kind,),
                "receive",
                f"For operators. {inspect.getdoc(kind)}".partition("\n")[0],
                (public.AdminDone, refusal),
            )
            for verb, kind in verbs.ADMIN_VERBS.items()
        ),
    ]


def event_channels() -> list[Channel]:
    """Events: batches of rows in the streams."""
    return [
        Channel(
            f"event-{kind.kind}",
            NAMES.event(kind.kind),
            (kind,),
            "send",
            f"Rows of {kind.__name__}, in the stream "
            f"{NAMES.outcome_stream if kind is events.OutcomeEvent else NAMES.event_stream}.",
            tag="events",
        )
        for kind in events.EVENTS
    ]


def inner_channels() -> list[Channel]:
    """Channels between the services; they may change at any time."""
    return [
        _inner("execute", NAMES.execute("{worker}", "{device}"), flow.Execute, "dispatcher -> executor"),
        _inner("done", NAMES.done("{dispatcher}"), flow.DoneBatch, "executor -> dispatcher"),
        _inner("part", NAMES.part("{dispatcher}", "{uid}"), public.Answer, "executor -> dispatcher"),
        _inner("ended", NAMES.ended("{dispatcher}"), flow.PartsEnded, "dispatcher -> executors"),
        _inner("echo", NAMES.echo("{dispatcher}"), flow.Echo, "dispatcher -> the same dispatcher"),
        _inner("resent", NAMES.resent(), flow.ResentSought, "dispatcher -> dispatchers and executors"),
        _inner("resent-to", NAMES.resent("{dispatcher}"), flow.ResentKnown, "dispatcher or executor -> dispatcher"),
        _inner("trying", NAMES.trying("{dispatcher}"), flow.Trying, "executor -> dispatcher"),
        _inner("resubmit", NAMES.resubmit(), flow.HandBack, "executor -> any dispatcher"),
        _inner("resubmit-to", NAMES.resubmit("{dispatcher}"), flow.HandBack, "executor -> its dispatcher"),
        _inner("heartbeat-worker", NAMES.worker_heartbeat("{worker}"), fleet.WorkerHeartbeat, "monitor -> all"),
        _inner("heartbeat-dispatcher", NAMES.dispatcher_heartbeat("{dispatcher}"), fleet.DispatcherHeartbeat, "to all"),
        Channel(
            "worker-load",
            NAMES.worker("{worker}", "load"),
            (fleet.EnsureLoaded,),
            "receive",
            "dispatcher -> monitor; the reply goes to the dispatcher's own subject.",
            (fleet.LoadAccepted, fleet.LoadRefused),
            "inner",
        ),
        _inner(
            "loads", NAMES.loads("{dispatcher}"), fleet.LoadReply, "monitor -> dispatcher, as the dispatcher reads it"
        ),
        _inner("worker-release", NAMES.worker("{worker}", "release"), fleet.Release, "operator -> monitor"),
        _inner(
            "executor-load", NAMES.executor("{worker}", "{device}", "load"), fleet.LoadInstance, "monitor -> executor"
        ),
        _inner(
            "executor-unload",
            NAMES.executor("{worker}", "{device}", "unload"),
            fleet.UnloadInstance,
            "monitor -> executor",
        ),
        _inner(
            "executor-demote",
            NAMES.executor("{worker}", "{device}", "demote"),
            fleet.DemoteInstance,
            "monitor -> executor",
        ),
        _inner(
            "executor-withdraw",
            NAMES.executor("{worker}", "{device}", "withdraw"),
            flow.Withdraw,
            "dispatcher -> executor",
        ),
        _inner(
            "executor-echo",
            NAMES.executor("{worker}", "{device}", "echo"),
            flow.Echo,
            "executor -> the same executor",
        ),
        _inner(
            "executor-succeed",
            NAMES.executor("{worker}", "{device}", "succeed"),
            fleet.SucceedExecutor,
            "executor -> the executor that it succeeds",
        )._replace(reply=(fleet.HeldInstances,)),
        _inner(
            "executor-move",
            NAMES.executor("{worker}", "{device}", "move"),
            fleet.MoveInstance,
            "monitor -> executor",
        ),
        *(
            _inner(f"monitor-{fact}", NAMES.monitor("{worker}", fact), message, "executor -> monitor")
            for fact, message in (
                ("loaded", fleet.InstanceLoaded),
                ("failed", fleet.InstanceFailed),
                ("unloaded", fleet.InstanceUnloaded),
                ("moved", fleet.InstanceMoved),
                ("report", fleet.ExecutorReport),
            )
        ),
        _inner("job-chunks", NAMES.job_chunks("{job}"), jobs.Chunk, "coordinator of jobs -> runners, in a work queue"),
        _inner("offline-part", NAMES.offline("part"), jobs.PartStored, "runner -> coordinators of jobs"),
        _inner("offline-note", NAMES.offline("note"), jobs.RunnerNote, "runner -> coordinators of jobs"),
        _inner("offline-alive", NAMES.offline("alive"), jobs.JobsHeartbeat, "coordinator -> coordinators of jobs"),
        _inner(
            "offline-answer",
            NAMES.offline_answer("{worker}", "{uid}"),
            public.Answer,
            "executor -> its worker's runner",
        ),
        _inner(
            "jobs",
            f"$KV.{NAMES.jobs_bucket}.{{job}}",
            jobs.JobRecord,
            "a key-value bucket written by the coordinators of jobs",
        ),
        _inner(
            "selection-changed",
            NAMES.selection("changed"),
            flow.ContextChanged,
            "dispatcher, registrar -> dispatchers that hold the context",
        ),
        _inner("selection-sought", NAMES.selection("sought"), flow.FeedbackSought, "dispatcher -> dispatchers"),
        _inner(
            "selection-taken",
            NAMES.selection("taken.{dispatcher}"),
            flow.FeedbackTaken,
            "the dispatcher that has the prediction -> the one that seeks it",
        ),
        _inner(
            "selection-told",
            NAMES.selection("told.{dispatcher}.{number}.{item}"),
            flow.FeedbackTold,
            "the dispatcher that sees to a feedback -> the one that has got its list",
        ),
        _inner("exited", NAMES.exited("{worker}", "{device}"), fleet.ExecutorExited, "supervisor -> all"),
        _inner("workshop-inspect", NAMES.workshop("{worker}", "inspect"), work.InspectModel, "registrar -> workshop"),
        _inner("workshop-build", NAMES.workshop("{worker}", "build"), work.BuildVariants, "registrar -> workshop"),
        _inner("workshop-cancel", NAMES.workshop("{worker}", "cancel"), work.CancelWork, "registrar -> workshop"),
        *(
            _inner(f"registrar-{fact}", NAMES.registrar(fact), message, source)
            for fact, message, source in (
                ("inspected", work.ModelInspected, "workshop -> registrar"),
                ("built", work.VariantBuilt, "workshop -> registrar"),
                ("variant-failed", work.VariantFailed, "workshop -> registrar"),
                ("progress", work.WorkProgress, "workshop -> registrar"),
                ("finished", work.WorkFinished, "workshop -> registrar"),
                ("alive", work.RegistrarHeartbeat, "registrar -> registrars"),
                ("release", quality.ReleaseCounted, "dispatcher -> registrars"),
                ("kept", work.ArtifactsKept, "registrar -> workshops"),
            )
        ),
        Channel(
            "registrar-container",
            NAMES.registrar("container"),
            (work.PlaceContainer,),
            "receive",
            "infaas container -> one registrar",
            (work.ContainerPlace, public.Refusal),
            "inner",
        ),
        *(
            Channel(
                f"catalog-{what}",
                f"$KV.{NAMES.catalog_bucket}.{key}",
                (record,),
                "send",
                "The catalogue, a key-value bucket written by the registrar and watched by everyone.",
                tag="inner",
            )
            for what, key, record in (
                ("app", "app.{app}", catalog.AppRecord),
                ("model", "model.{model}.{version}", catalog.ModelRecord),
                ("variant", "variant.{variant}", catalog.VariantRecord),
                ("quality", "quality.{app}", quality.AppQuality),
            )
        ),
    ]


def scaling_channels() -> list[Channel]:
    """Channels of the autoscalers: dispatchers, monitors, the controller, and whatever starts machines."""
    answers = (scaling.MachineReply,)
    return [
        _inner(
            "demand", NAMES.demand("{dispatcher}"), scaling.DemandReport, "dispatcher -> autoscalers that are static"
        ),
        _inner(
            "worker-demand",
            NAMES.worker("{worker}", "demand"),
            scaling.DemandReport,
            "dispatcher -> a worker's autoscaler",
        ),
        _inner("pipeline-arrivals", NAMES.pipeline("arrivals"), scaling.PipelineArrivals, "dispatcher -> controller"),
        _inner("controller-ask", NAMES.controller("ask"), scaling.AskToMove, "worker -> controller"),
        _inner("controller-sampled", NAMES.controller("sampled"), scaling.QueriesSampled, "executor -> controller"),
        _inner(
            "controller-objectives",
            NAMES.controller("objectives"),
            scaling.ObjectiveReport,
            "controller -> whoever asks how the apps do",
        ),
        _inner(
            "controller-reply",
            NAMES.controller("reply.{controller}.{order}"),
            fleet.LoadReply,
            "monitor -> controller, as the controller reads it",
        ),
        Channel(
            "recorder-demand",
            NAMES.recorder("demand"),
            (scaling.AskForHistory,),
            "receive",
            "controller -> a recorder; the reply goes to the controller's own subject.",
            (scaling.DemandHistory,),
            "inner",
        ),
        _inner(
            "controller-history",
            NAMES.controller("history.{controller}"),
            scaling.DemandHistory,
            "recorder -> controller, as the controller reads it",
        ),
        Channel(
            "worker-drain",
            NAMES.worker("{worker}", "drain"),
            (scaling.Drain,),
            "receive",
            "controller -> monitor.",
            (fleet.LoadAccepted, fleet.LoadRefused),
            "inner",
        ),
        *(
            Channel(
                f"machines-{order}",
                NAMES.machines(order),
                (message,),
                "receive",
                "controller -> whoever owns the processes of a machine.",
                answers,
                "inner",
            )
            for order, message in (("start", scaling.StartMachine), ("stop", scaling.StopMachine))
        ),
        _inner(
            "leader",
            f"$KV.{NAMES.control_bucket}.controller",
            scaling.LeaderRecord,
            "a key changed by compare-and-set: who leads",
        ),
        _inner(
            "drift",
            f"$KV.{NAMES.control_bucket}.drift.{{app}}",
            scaling.DriftRecord,
            "the leader's: how an app's queries differ from the validation set, for its successor",
        ),
        _inner(
            "machine",
            f"$KV.{NAMES.control_bucket}.machine.{{worker}}",
            scaling.MachineRecord,
            "the leader's present action on a machine, for its successor",
        ),
    ]


def _inner(key: str, address: str, message: type, summary: str) -> Channel:
    return Channel(key, address, (message,), "send", summary, tag="inner")


def channels() -> list[Channel]:
    """All channels."""
    return [*public_channels(), *event_channels(), *inner_channels(), *scaling_channels()]
