//! From a task's name or a job file, and flags, to a job: the task's defaults, then the file, then
//! the flags.

use std::path::Path;
use std::sync::Arc;

use clap::Args;
use serde_json::{Map, Value, json};
use skep_learn::Task;
use skep_wire::Job;

use crate::failure::Failure;

/// Local steps per model, unless told otherwise.
const LOCAL_STEPS: u64 = 32;

/// Settings that can be given on the command line.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct JobFlags {
    /// The data: what `skep data split` wrote, or one shard of it; for images the four files of MNIST,
    /// a folder of .png or .jpg per class, or .csv; for reviews a folder, .tar.gz, .csv, .jsonl or .npz
    #[arg(long, value_name = "PATH")]
    pub(crate) data: Option<String>,
    /// The model, where a task has several: text-average or text-bigru for imdb
    #[arg(long, value_name = "KIND")]
    pub(crate) model: Option<String>,
    /// Whole copies of the training data, each with an order of its own; with --policy average:once
    /// one model is trained on each, else each sample is used so many times as often
    #[arg(long, value_name = "N")]
    pub(crate) copies: Option<usize>,
    /// How often each sample is used
    #[arg(long, value_name = "N", conflicts_with = "steps")]
    pub(crate) epochs: Option<u64>,
    /// How many versions to make instead; 0 trains until stopped
    #[arg(long, value_name = "N")]
    pub(crate) steps: Option<u64>,
    /// Samples per backward pass
    #[arg(long, value_name = "N")]
    pub(crate) batch: Option<u64>,
    /// Backward passes per contribution
    #[arg(long, value_name = "N")]
    pub(crate) every: Option<u64>,
    /// The learning rate
    #[arg(long, value_name = "RATE")]
    pub(crate) rate: Option<f64>,
    /// What workers bring home: gradients or models
    #[arg(long, value_name = "EXCHANGE")]
    pub(crate) exchange: Option<String>,
    /// How the average of models becomes the next version: none, sgd or nesterov (DiLoCo)
    #[arg(long, value_name = "KIND")]
    pub(crate) outer: Option<String>,
    /// How contributions become versions: batch:4, async, async:max_staleness=2, sync:4, average:4
    #[arg(long, value_name = "POLICY")]
    pub(crate) policy: Option<String>,
    /// sgd, adam, adamw or rmsprop
    #[arg(long, value_name = "KIND", alias = "optimizer")]
    pub(crate) optimiser: Option<String>,
    /// From which all randomness comes
    #[arg(long, value_name = "N")]
    pub(crate) seed: Option<u64>,
    /// A file to start from: safetensors, or a PyTorch .pth (weights only)
    #[arg(long, value_name = "FILE")]
    pub(crate) init: Option<String>,
    /// How gradients and parameters travel: f32 or bf16
    #[arg(long, value_name = "ENCODING")]
    pub(crate) encoding: Option<String>,
    /// End once the validation accuracy reaches this, from 0 to 1
    #[arg(long, value_name = "SHARE")]
    pub(crate) until_accuracy: Option<f64>,
    /// End after so many minutes
    #[arg(long, value_name = "N")]
    pub(crate) minutes: Option<f64>,
    /// The run's name
    #[arg(long, value_name = "RUN")]
    pub(crate) name: Option<String>,
    /// Any setting of a job, such as optimiser.momentum=0.8; may be given several times
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub(crate) settings: Vec<String>,
}

/// A job and the task it is of.
pub(crate) struct TaskJob {
    pub(crate) task: Arc<dyn Task>,
    pub(crate) job: Job,
    /// What the run is called unless it has a name.
    pub(crate) usual_name: String,
}

/// Reads what `what` names: a job file, or a task.
pub(crate) fn read(
    what: &str,
    flags: &JobFlags,
    tasks: &[Arc<dyn Task>],
) -> Result<TaskJob, Failure> {
    let is_file = what.ends_with(".toml") || Path::new(what).is_file();
    let file = if is_file { read_file(what)? } else { Map::new() };
    let kind = file.get("model").and_then(|model| model.get("kind")).and_then(Value::as_str);
    let source = file.get("data").and_then(|data| data.get("source")).and_then(Value::as_str);
    let model = flags.model.as_deref();
    let wanted = if is_file { model.or(kind).or(source) } else { Some(what) };
    let named = find(tasks, wanted);
    let task = match (named.first(), model) {
        (None, _) => return Err(unknown(wanted.unwrap_or_default(), tasks)),
        (Some(first), None) => first,
        (Some(_), Some(model)) => {
            let of_model = named.iter().find(|task| task.name() == model);
            of_model.ok_or_else(|| {
                let models: Vec<_> = named.iter().map(|task| task.name()).collect();
                Failure::mistake(format!("`{}` has no model `{model}`", wanted.unwrap_or(what)))
                    .hint(format!("it has {}", models.join(", ")))
            })?
        }
    };
    let mut settings = serde_json::to_value(task.defaults()).unwrap_or_default();
    if !is_file {
        settings["run"]["name"] = Value::Null;
    }
    let file = Value::Object(file);
    let overrides = flag_settings(flags)?;
    let given = |path: &str| overrides.pointer(path).or_else(|| file.pointer(path));
    // A task's own schedule is made for runs whose length is known.
    if given("/run/steps") == Some(&json!(0))
        && given("/optimiser/schedule").is_none()
        && let Some(optimiser) = settings["optimiser"].as_object_mut()
    {
        optimiser.remove("schedule");
    }
    // Who averages, or has an outer optimiser, exchanges models; who does that averages.
    let averages = given("/policy/kind") == Some(&json!("average")) || given("/outer").is_some();
    let exchange = given("/run/exchange").cloned();
    let exchange = exchange.or_else(|| averages.then(|| json!("models")));
    if exchange == Some(json!("models")) {
        settings["run"]["exchange"] = json!("models");
        settings["policy"] = json!({ "kind": "average" });
        settings["train"]["every"] = json!(LOCAL_STEPS);
    }
    merge(&mut settings, file);
    merge(&mut settings, overrides);
    settings["model"]["kind"] = json!(task.name());
    let job: Job = serde_json::from_value(settings).map_err(|error| {
        Failure::mistake(format!("{what}: {error}"))
            .hint("docs/job.md lists every setting of a job")
    })?;
    // A task may go by the name of a dataset that it does not have built in.
    let built_in = task.aliases().contains(&what) && job.data.source == task.defaults().data.source;
    if built_in && !task.stands_in(what) {
        return Err(Failure::mistake(format!("`{what}` is not built in"))
            .hint(format!("get it with `skep data fetch {what}`, then add --data data/{what}")));
    }
    let what = if built_in { &job.data.source } else { what };
    let stem = Path::new(what).file_stem().and_then(|stem| stem.to_str()).unwrap_or("run");
    let usual: String = stem
        .to_ascii_lowercase()
        .chars()
        .map(|c| if c.is_ascii_alphanumeric() || c == '-' { c } else { '-' })
        .take(40)
        .collect();
    let usual = usual.trim_matches('-').to_owned();
    let usual_name = if usual.is_empty() { "run".to_owned() } else { usual };
    Ok(TaskJob { task: Arc::clone(task), job, usual_name })
}

/// The tasks of a name: their own, their data's, or another they go by; all where nothing is said.
/// The first is the usual one.
fn find<'tasks>(tasks: &'tasks [Arc<dyn Task>], name: Option<&str>) -> Vec<&'tasks Arc<dyn Task>> {
    let Some(name) = name else { return tasks.iter().collect() };
    let fits = |task: &&Arc<dyn Task>| {
        task.defaults().data.source == name || task.aliases().contains(&name)
    };
    match tasks.iter().find(|task| task.name() == name) {
        Some(task) => vec![task],
        None => tasks.iter().filter(fits).collect(),
    }
}

fn unknown(name: &str, tasks: &[Arc<dyn Task>]) -> Failure {
    let known: Vec<_> = tasks
        .iter()
        .map(|task| {
            let source = task.defaults().data.source;
            let usual = task.aliases().first().map_or(source, |&alias| alias.to_owned());
            if usual == task.name() { usual } else { format!("{usual} ({})", task.name()) }
        })
        .collect();
    Failure::mistake(format!("there is no task or job file `{name}`"))
        .hint(format!("tasks: {}; job files end in .toml", known.join(", ")))
}

fn read_file(path: &str) -> Result<Map<String, Value>, Failure> {
    let text = std::fs::read_to_string(path)
        .map_err(|error| Failure::mistake(format!("{path}: {error}")))?;
    let table: toml::Table = toml::from_str(&text)
        .map_err(|error| Failure::mistake(format!("{path} is not TOML: {error}")))?;
    let Ok(Value::Object(mut map)) = serde_json::to_value(table) else {
        return Err(Failure::mistake(format!("{path}: a job is a table")));
    };
    // `optimizer` is what half of the world writes.
    if let Some(value) = map.remove("optimizer") {
        map.insert("optimiser".to_owned(), value);
    }
    Ok(map)
}

/// Tables are merged, everything else is replaced. A new `kind` of policy, optimiser or schedule
/// comes without the settings of the old one.
fn merge(into: &mut Value, from: Value) {
    match (into, from) {
        (Value::Object(into), Value::Object(from)) => {
            let other_kind = from
                .get("kind")
                .is_some_and(|kind| into.get("kind").is_some_and(|known| known != kind));
            if other_kind {
                into.clear();
            }
            for (name, value) in from {
                merge(into.entry(name).or_insert(Value::Null), value);
            }
        }
        (into, from) => *into = from,
    }
}

fn flag_settings(flags: &JobFlags) -> Result<Value, Failure> {
    let mut settings = json!({});
    let mut put = |table: &str, name: &str, value: Option<Value>| {
        if let Some(value) = value {
            settings[table][name] = value;
        }
    };
    // A folder that is called like a built-in set is a folder.
    let data = flags.data.clone().map(|data| {
        if Path::new(&data).is_dir() && !data.contains('/') { format!("./{data}") } else { data }
    });
    put("data", "source", data.map(Value::from));
    put("data", "copies", flags.copies.map(Value::from));
    put("run", "epochs", flags.epochs.map(Value::from));
    put("run", "steps", flags.steps.map(Value::from));
    put("run", "seed", flags.seed.map(Value::from));
    put("run", "exchange", flags.exchange.clone().map(Value::from));
    put("outer", "kind", flags.outer.clone().map(Value::from));
    put("run", "name", flags.name.clone().map(Value::from));
    put("train", "batch", flags.batch.map(Value::from));
    put("train", "every", flags.every.map(Value::from));
    put("train", "encoding", flags.encoding.clone().map(Value::from));
    put("optimiser", "kind", flags.optimiser.clone().map(Value::from));
    put("optimiser", "rate", flags.rate.map(Value::from));
    put("model", "init", flags.init.clone().map(Value::from));
    put("stop", "accuracy", flags.until_accuracy.map(Value::from));
    put("stop", "minutes", flags.minutes.map(Value::from));
    if flags.epochs.is_some() {
        settings["run"]["steps"] = Value::Null;
    }
    if let Some(text) = &flags.policy {
        settings["policy"] = policy(text)?;
    }
    for setting in &flags.settings {
        let wrong = || {
            Failure::mistake(format!("--set `{setting}` is not KEY=VALUE"))
                .hint("such as --set optimiser.momentum=0.8")
        };
        let (path, value) = setting.split_once('=').ok_or_else(wrong)?;
        let value = serde_json::from_str(value).unwrap_or_else(|_| Value::from(value));
        let mut nested = value;
        for name in path.rsplit('.') {
            if name.is_empty() {
                return Err(wrong());
            }
            nested = json!({ name: nested });
        }
        merge(&mut settings, nested);
    }
    Ok(settings)
}

/// `batch:4`, `sync:4`, `async`, `async:max_staleness=2,damping=0`, `average:4,quorum=3`,
/// `average:once`.
fn policy(text: &str) -> Result<Value, Failure> {
    let wrong = || {
        Failure::mistake(format!("--policy `{text}` is not a policy"))
            .hint("such as batch:4, async:max_staleness=2, sync:4,backup=1 or average:4,quorum=3")
    };
    let (kind, rest) = text.split_once(':').unwrap_or((text, ""));
    let main = match kind {
        "batch" => "size",
        "sync" | "average" => "slots",
        "async" => "max_staleness",
        _ => return Err(wrong()),
    };
    let mut table = json!({ "kind": kind });
    for part in rest.split(',').filter(|part| !part.is_empty()) {
        if (kind, part) == ("average", "once") {
            table["rounds"] = json!("once");
            continue;
        }
        let (name, value) = part.split_once('=').unwrap_or((main, part));
        table[name] = serde_json::from_str(value).map_err(|_| wrong())?;
    }
    Ok(table)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn job(what: &str, flags: JobFlags) -> Result<Job, Failure> {
        read(what, &flags, &skep_learn::tasks()).map(|read| read.job)
    }

    #[test]
    fn flags_beat_the_file_and_the_file_beats_the_defaults() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("job.toml");
        let text = "[train]\nbatch = 16\nevery = 3\n[optimiser]\nkind = \"adam\"\n\
                    schedule = { kind = \"cosine\", warm_up = 100 }\n[run]\nepochs = 2\n";
        std::fs::write(&path, text).expect("writes");
        let flags = JobFlags {
            batch: Some(8),
            settings: vec!["lease.seconds=3".to_owned()],
            policy: Some("sync:4,backup=1".to_owned()),
            ..JobFlags::default()
        };
        let job = job(path.to_str().expect("plain"), flags).expect("a good job");
        assert_eq!((job.train.batch, job.train.every, job.run.epochs), (8, 3, 2));
        assert_eq!(job.lease.seconds, 3.0);
        assert_eq!(job.optimiser["kind"], "adam");
        assert!(job.optimiser.get("momentum").is_none(), "sgd's settings are gone with sgd");
        assert_eq!(Value::Object(job.policy), json!({"kind": "sync", "slots": 4, "backup": 1}));
    }

    #[test]
    fn who_averages_exchanges_models() {
        let with = |policy: Option<&str>, outer: Option<&str>, exchange: Option<&str>| {
            let own = |text: Option<&str>| text.map(str::to_owned);
            let (policy, outer, exchange) = (own(policy), own(outer), own(exchange));
            let flags = JobFlags { policy, outer, exchange, ..JobFlags::default() };
            job("mnist", flags).expect("a good job")
        };
        let average = with(Some("average:5,quorum=4,grace=0.5"), None, None);
        assert_eq!(average.run.exchange, "models");
        let policy = json!({"kind": "average", "slots": 5, "quorum": 4, "grace": 0.5});
        assert_eq!(Value::Object(average.policy), policy);
        assert_eq!(average.train.every, LOCAL_STEPS);
        let once = with(Some("average:once"), None, None);
        assert_eq!(Value::Object(once.policy), json!({"kind": "average", "rounds": "once"}));
        for job in [with(None, Some("nesterov"), None), with(None, None, Some("models"))] {
            assert_eq!(job.run.exchange, "models");
            assert_eq!(Value::Object(job.policy), json!({"kind": "average"}));
        }
        assert_eq!(with(None, None, None).run.exchange, "gradients");
    }

    #[test]
    fn a_run_without_end_has_no_schedule_unless_it_is_given_one() {
        let endless = |settings: &[&str]| {
            let settings = settings.iter().map(|&text| text.to_owned()).collect();
            job("mnist", JobFlags { steps: Some(0), settings, ..JobFlags::default() })
                .expect("a good job")
                .optimiser
        };
        assert!(endless(&[]).get("schedule").is_none());
        let given = endless(&["optimiser.schedule.steps=9"]);
        assert_eq!(given["schedule"], json!({"kind": "cosine", "steps": 9}));
    }

    #[test]
    fn mistakes_are_named() {
        for (flags, part) in [
            (JobFlags { policy: Some("ring".into()), ..JobFlags::default() }, "ring"),
            (JobFlags { settings: vec!["batch".into()], ..JobFlags::default() }, "KEY=VALUE"),
            (JobFlags { settings: vec!["train.bath=3".into()], ..JobFlags::default() }, "bath"),
        ] {
            let failure = job("mnist", flags).expect_err("a mistake");
            assert!(failure.code == 2 && failure.message.contains(part), "{failure}");
        }
        let failure = job("nothing", JobFlags::default()).expect_err("no such task");
        assert!(failure.hint.contains("mnist"), "{failure}");
    }
}
