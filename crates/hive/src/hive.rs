//! A hive: a store, a generation, and its runs.

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use bytes::Bytes;
use serde_json::{Value, json};
use skep_core::{LeaseTimes, Limit, Plan, Policy, PolicySettings, Run, RunSnapshot, Status};
use skep_data::{DataError, RunFiles, Store, claim_generation, list_runs, put_shard};
use skep_math::{OptimiserSettings, OuterSettings, all_finite};
use skep_wire::{
    AssetRef, Encoding, ErrorCode, Frame, Layout, Manifest, RunSpec, ShardRef, Split, Version,
};
use tokio::sync::{mpsc, oneshot, watch};

use crate::budget::Budget;
use crate::checkpointer::{Checkpointer, decode, watch_generation};
use crate::events::Events;
use crate::history::Recorder;
use crate::keeper::{Command, Keeper, KeeperParts, KeptState};
use crate::metrics::Counters;
use crate::metrics_files::MetricsFiles;
use crate::model::{Model, Rules};
use crate::published::{FormLayouts, Published, frame_bytes};
use crate::run_handle::RunHandle;
use crate::spool::SpoolEntry;
use crate::{Access, ApiError, Deadlines, HiveError};

/// A run has a vocabulary or names of classes, not a collection of files.
const MOST_ASSETS: usize = 16;

/// Nobody can look into a shard that is known by name. Its count takes no memory; the bound keeps
/// sums of counts far from overflowing.
const MOST_NAMED_SAMPLES: u64 = 1 << 40;

/// How a hive is set up.
pub struct HiveSettings {
    /// Where everything is kept.
    pub store: Store,
    /// Who may do what.
    pub access: Access,
    /// How many bytes of bodies may be in memory at once.
    pub byte_budget: usize,
    /// How long to wait for others.
    pub deadlines: Deadlines,
}

/// A hive.
pub struct Hive {
    pub(crate) store: Store,
    pub(crate) access: Access,
    pub(crate) budget: Budget,
    pub(crate) generation: u64,
    pub(crate) byte_budget: usize,
    pub(crate) deadlines: Deadlines,
    runs: RwLock<BTreeMap<String, Arc<RunHandle>>>,
    replaced: watch::Sender<Option<u64>>,
}

impl Hive {
    /// Claims the next generation of the store and goes on with its runs.
    pub async fn open(settings: HiveSettings) -> Result<Arc<Self>, HiveError> {
        let program = format!("skep {}", env!("CARGO_PKG_VERSION"));
        let generation = claim_generation(&settings.store, &program).await?;
        let replaced = watch::Sender::new(None);
        let hive = Arc::new(Self {
            store: settings.store,
            access: settings.access,
            budget: Budget::new(settings.byte_budget),
            generation,
            byte_budget: settings.byte_budget,
            deadlines: settings.deadlines,
            runs: RwLock::default(),
            replaced,
        });
        tokio::spawn(watch_generation(hive.store.clone(), generation, hive.replaced.clone()));
        for name in list_runs(&hive.store).await? {
            match hive.load(&name).await {
                Ok(handle) => {
                    let version = handle.published.newest().version;
                    tracing::info!(run = name, %version, "goes on");
                    hive.insert(&name, handle);
                }
                Err(error) => tracing::error!(run = name, "cannot go on: {error}"),
            }
        }
        Ok(hive)
    }

    /// Its generation.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// The store.
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// Resolves when another hive has claimed the store.
    pub async fn replaced(&self) -> HiveError {
        let mut receiver = self.replaced.subscribe();
        let newer = match receiver.wait_for(Option::is_some).await {
            Ok(newer) => newer.unwrap_or_default(),
            Err(_) => 0,
        };
        HiveError::Replaced { newer, own: self.generation }
    }

    /// The names of its runs.
    pub fn run_names(&self) -> Vec<String> {
        self.lock().keys().cloned().collect()
    }

    pub(crate) fn run(&self, name: &str) -> Result<Arc<RunHandle>, ApiError> {
        self.lock().get(name).cloned().ok_or_else(|| {
            ApiError::new(
                ErrorCode::NotFound,
                format!("there is no run `{}`", name.chars().take(80).collect::<String>()),
                "`skep run list` shows the runs there are",
            )
        })
    }

    pub(crate) fn handles(&self) -> Vec<Arc<RunHandle>> {
        self.lock().values().cloned().collect()
    }

    fn lock(&self) -> std::sync::RwLockReadGuard<'_, BTreeMap<String, Arc<RunHandle>>> {
        self.runs.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn insert(&self, name: &str, handle: RunHandle) {
        let mut runs = self.runs.write().unwrap_or_else(PoisonError::into_inner);
        runs.insert(name.to_owned(), Arc::new(handle));
    }

    /// Keeps a shard, under the hash of its bytes.
    pub async fn put_shard(&self, hash: &str, bytes: Bytes) -> Result<(), DataError> {
        put_shard(&self.store, hash, bytes).await
    }

    /// Creates a run from its description and version 0, and starts it.
    pub async fn create(&self, spec: RunSpec, version0: &[u8]) -> Result<(), ApiError> {
        let wrong = |message: String| ApiError::new(ErrorCode::BadRequest, message, "");
        if !RunSpec::is_name(&spec.name) {
            return Err(wrong(format!(
                "`{}` cannot be a run's name; names have lower-case letters, digits, `-`, `_` \
                 and `.`, at most 63",
                spec.name.chars().take(80).collect::<String>()
            )));
        }
        let layout = Arc::new(Layout::of_version(&spec.schema, Encoding::F32)?);
        let frame = Frame::read(&layout, version0)?;
        if !all_finite(frame.floats()) {
            return Err(ApiError::new(ErrorCode::NotFinite, "version 0 is not finite", ""));
        }
        // Everything that can be wrong with the settings is found before anything is written.
        plan(&spec).map_err(wrong)?;
        model(&spec, frame.clone()).map_err(wrong)?;
        self.check_shards(&spec.manifest).await?;
        let files = RunFiles::new(self.store.clone(), &spec.name)
            .map_err(|error| wrong(error.to_string()))?;
        let provenance = json!({ "created_by": spec.made_by, "hive": version_text() });
        match files.create(&spec, frame_bytes(&Arc::new(frame)), provenance).await {
            Ok(()) => {}
            Err(DataError::Exists { .. }) => {
                return Err(ApiError::new(
                    ErrorCode::Exists,
                    format!("there is a run `{}`", spec.name),
                    "choose another name, or delete it with `skep run delete`",
                ));
            }
            Err(error) => return Err(ApiError::internal(&error)),
        }
        let handle = self.load(&spec.name).await.map_err(|error| ApiError::internal(&error))?;
        self.insert(&spec.name, handle);
        tracing::info!(run = spec.name, "created");
        Ok(())
    }

    async fn check_shards(&self, manifest: &Manifest) -> Result<(), ApiError> {
        for asset in &manifest.assets {
            let known = manifest.assets.iter().filter(|other| other.name == asset.name).count();
            if !RunSpec::is_name(&asset.name) || known > 1 || manifest.assets.len() > MOST_ASSETS {
                return Err(ApiError::bad(format!(
                    "a run has at most {MOST_ASSETS} assets, of different names: lower-case \
                     letters, digits, `-`, `_` and `.`"
                )));
            }
        }
        let assets: Vec<_> = manifest.assets.iter().map(as_shard).collect();
        for shard in manifest.shards().chain(&assets) {
            check_shard(shard).map_err(ApiError::bad)?;
            if !shard.is_kept() {
                continue;
            }
            let path = skep_data::shard_path(&shard.hash)
                .map_err(|error| ApiError::bad(error.to_string()))?;
            let size = self.store.size(&path).await.map_err(|error| ApiError::internal(&error))?;
            if size != Some(shard.bytes) {
                return Err(ApiError::new(
                    ErrorCode::BadRequest,
                    format!("shard {} is not in the store", shard.hash),
                    "send it first: PUT /v1/shards/{hash}",
                ));
            }
        }
        Ok(())
    }

    /// Deletes a run and everything of it but shards.
    pub(crate) async fn delete(&self, name: &str) -> Result<(), ApiError> {
        let handle = self.run(name)?;
        self.runs.write().unwrap_or_else(PoisonError::into_inner).remove(name);
        // What is still being written would outlive the run, and a run of the same name that is
        // created later would go on from it.
        let (reply, done) = oneshot::channel();
        if handle.commands.send(Command::Drop { reply }).is_ok() {
            let _ = tokio::time::timeout(Duration::from_secs(20), done).await;
        }
        let files =
            RunFiles::new(self.store.clone(), name).map_err(|error| ApiError::internal(&error))?;
        files.delete().await.map_err(|error| ApiError::internal(&error))
    }

    /// Writes last checkpoints of all runs.
    pub async fn close(&self) {
        for handle in self.handles() {
            let (reply, done) = oneshot::channel();
            if handle.commands.send(Command::Close { reply }).is_ok()
                && tokio::time::timeout(Duration::from_secs(20), done).await.is_err()
            {
                tracing::error!(
                    run = handle.spec.name,
                    "the last checkpoint was not written in time"
                );
            }
        }
    }

    /// Starts the keeper of a run as its newest checkpoint left it.
    async fn load(&self, name: &str) -> Result<RunHandle, HiveError> {
        let wrong = |message: String| HiveError::Run { run: name.to_owned(), message };
        let files = RunFiles::new(self.store.clone(), name)?;
        let spec = files.spec().await?;
        let newest = files.newest_checkpoint().await?;
        for warning in &newest.warnings {
            tracing::warn!(run = name, "{warning}");
        }
        let layout = Layout::of_version(&spec.schema, Encoding::F32)
            .map_err(|error| wrong(error.to_string()))?;
        let layout = Arc::new(layout);
        let read =
            |bytes: &[u8]| Frame::read(&layout, bytes).map_err(|error| wrong(error.to_string()));
        let (frame, optimiser, kept, durable) = match newest.checkpoint {
            Some(checkpoint) => {
                let later = files.read_state(checkpoint.version).await?;
                let kept: KeptState = serde_json::from_value(later.unwrap_or(checkpoint.state))
                    .map_err(|error| wrong(format!("checkpoint: {error}")))?;
                let optimiser =
                    decode(&checkpoint.optimiser).map_err(|error| wrong(error.to_string()))?;
                (read(&checkpoint.model)?, Some(optimiser), kept, checkpoint.version)
            }
            None => {
                let run = RunSnapshot {
                    number: 0,
                    ledger: Default::default(),
                    samples: 0,
                    status: Status::Running,
                    reason: String::new(),
                    round: None,
                };
                let kept = KeptState {
                    run,
                    seconds: 0.0,
                    loss: None,
                    validation: None,
                    best: None,
                    test: None,
                };
                (read(&files.version0().await?)?, None, kept, Version::new(0, 0))
            }
        };
        let plan = plan(&spec).map_err(wrong)?;
        let final_written = matches!(files.final_model().await, Ok(Some(_)));
        // A run that has ended stays as it is, under the name that its last version has.
        let ended = matches!(kept.run.status, Status::Done | Status::Stopped | Status::Failed);
        let generation = if ended && final_written { durable.generation } else { self.generation };
        let run =
            Run::restore(plan, generation, &kept.run).map_err(|error| wrong(error.to_string()))?;
        let mut model = model(&spec, frame).map_err(wrong)?;
        if let Some(state) = optimiser {
            model.restore_optimiser(state).map_err(wrong)?;
        }
        let layouts = FormLayouts::new(&spec.schema).map_err(|error| wrong(error.to_string()))?;
        let version = Version::new(generation, run.number());
        let published = Arc::new(Published::new(version, model.current().clone(), layouts));
        let events = Arc::new(Events::default());
        let counters = Arc::new(Counters::default());
        let known = MetricsFiles::read(&files).await;
        let recorder = Arc::new(Recorder::new(known, run.number(), counters.clone()));
        let metrics = MetricsFiles::new(files.clone(), self.generation, recorder.clone());
        let (commands, inbox) = std::sync::mpsc::channel();
        let (writes, wishes) = mpsc::unbounded_channel();
        let checkpointer = Checkpointer {
            files: files.clone(),
            generation: self.generation,
            keep: spec.job.checkpoint.keep.max(1),
            provenance: provenance(&spec),
            keeper: commands.clone(),
            replaced: self.replaced.clone(),
            best: files.read_hint("best").await.ok().flatten(),
        };
        tokio::spawn(checkpointer.run(wishes, metrics));
        let model_path = self
            .store
            .local_path(&files.final_model_path())
            .map_or_else(|| files.final_model_path(), |path| path.display().to_string());
        let handle = RunHandle {
            spec: spec.clone(),
            gradient_layout: model.gradient_layout.clone(),
            narrow_gradient_layout: model.narrow_gradient_layout.clone(),
            published: published.clone(),
            events: events.clone(),
            counters: counters.clone(),
            recorder: recorder.clone(),
            shards: spec
                .manifest
                .shards()
                .cloned()
                .chain(spec.manifest.assets.iter().map(as_shard))
                .map(|shard| (shard.id().to_owned(), shard))
                .collect(),
            commands,
        };
        let spool = read_spool(&files, &model.gradient_layout).await?;
        let keeper = Keeper::new(KeeperParts {
            run,
            model,
            spec,
            published,
            events,
            counters,
            recorder,
            writes,
            kept,
            durable,
            model_path,
            final_written,
            spool,
        });
        std::thread::Builder::new()
            .name(format!("run {name}"))
            .spawn(move || keeper.keep(inbox))
            .map_err(|source| HiveError::Io { what: "starting a thread".to_owned(), source })?;
        Ok(handle)
    }
}

/// What was accepted before a crash. A file that cannot be read is work that is done again.
async fn read_spool(
    files: &RunFiles,
    layout: &Arc<Layout>,
) -> Result<Vec<(SpoolEntry, Frame)>, HiveError> {
    let mut spool = Vec::new();
    for name in files.spooled().await? {
        let entry = SpoolEntry::decode(layout, &files.read_spooled(&name).await?);
        match entry {
            Ok((entry, frame)) if entry.name() == name => spool.push((entry, frame)),
            _ => {
                tracing::warn!(run = files.run(), "spooled model {name} is damaged: dropped");
                files.unspool(&name).await?;
            }
        }
    }
    Ok(spool)
}

/// An asset is sent, kept and fetched like a shard.
fn as_shard(asset: &AssetRef) -> ShardRef {
    ShardRef::kept(asset.hash.clone(), 1, asset.bytes)
}

/// Whether a shard can be: nothing is known of its bytes yet.
fn check_shard(shard: &ShardRef) -> Result<(), &'static str> {
    if shard.is_kept() {
        // A sample has a byte at least: what is worked out from counts stays in proportion.
        let good = ShardRef::is_hash(&shard.hash) && (1..=shard.bytes).contains(&shard.samples);
        return good.then_some(()).ok_or(
            "the manifest names a shard without hash, name or samples, or with more samples than \
             bytes",
        );
    }
    if !shard.hash.is_empty() || shard.bytes > 0 {
        return Err("a shard has either a hash and bytes, or a name");
    }
    if !ShardRef::is_name(&shard.name) {
        return Err("a shard's name has 1 to 128 visible ASCII characters and is not a hash");
    }
    if !(1..=MOST_NAMED_SAMPLES).contains(&shard.samples) {
        return Err("a shard that is known by name has 1 to 2^40 samples");
    }
    Ok(())
}

fn version_text() -> String {
    format!("skep {}", env!("CARGO_PKG_VERSION"))
}

/// Where a checkpoint comes from: program, job and data.
fn provenance(spec: &RunSpec) -> Value {
    let job = serde_json::to_vec(&spec.job).unwrap_or_default();
    let shards: Vec<_> = spec.manifest.shards().map(ShardRef::id).collect();
    json!({
        "hive": version_text(),
        "made_by": spec.made_by,
        "job_sha256": skep_data::shard_hash(&job),
        "data_sha256": skep_data::shard_hash(shards.join("\n").as_bytes()),
        "source": spec.manifest.source,
        "seed": spec.job.run.seed,
    })
}

/// What a run decides by.
fn plan(spec: &RunSpec) -> Result<Plan, String> {
    let job = &spec.job;
    let models = exchanges_models(spec)?;
    let mut policy: PolicySettings = serde_json::from_value(Value::Object(job.policy.clone()))
        .map_err(|error| format!("policy: {error}"))?;
    if models {
        policy.kind.get_or_insert_with(|| "average".to_owned());
    }
    let once = policy.is_once();
    let policy = policy.policy().map_err(|error| error.to_string())?;
    if models != matches!(policy, Policy::Average { .. }) {
        return Err(
            "the policy `average` goes with run.exchange = \"models\", and only with it".into()
        );
    }
    if !models && !job.outer.is_empty() {
        return Err("the table `outer` is for run.exchange = \"models\"".into());
    }
    let millis = |name: &str, seconds: f64| {
        if (0.001..=1e7).contains(&seconds) {
            Ok((seconds * 1000.0) as u64)
        } else {
            Err(format!("{name} is {seconds}; it must be from 0.001 to 10000000 seconds"))
        }
    };
    let limit = match job.run.steps {
        Some(0) => Limit::Endless,
        Some(steps) => Limit::Steps(steps),
        None if job.run.epochs == 0 => {
            return Err("run.epochs must be 1 or more; run.steps = 0 trains until stopped".into());
        }
        // Each worker goes through its shard so many times by itself.
        None if once => Limit::Epochs(1),
        None => Limit::Epochs(job.run.epochs),
    };
    if once && job.run.steps.is_some() {
        return Err("run.steps is not for policy.rounds = \"once\": it makes one version".into());
    }
    if job.stop.accuracy.is_some_and(|accuracy| !(0.0..=1.0).contains(&accuracy)) {
        return Err("stop.accuracy must be from 0 to 1".to_owned());
    }
    if job.stop.minutes.is_some_and(|minutes| minutes.is_nan() || minutes <= 0.0) {
        return Err("stop.minutes must be more than 0".to_owned());
    }
    if job.stop.steps == Some(0) {
        return Err("stop.steps must be 1 or more".to_owned());
    }
    let chunk = match job.train.batch.checked_mul(job.train.every).unwrap_or(0) {
        0 => 0,
        _ if once => u64::MAX,
        chunk => chunk,
    };
    let samples = |split| spec.manifest.split(split).iter().map(|shard| shard.samples).collect();
    let plan = Plan {
        seed: job.run.seed,
        shards: samples(Split::Train),
        validation: samples(Split::Validation),
        test: samples(Split::Test),
        chunk,
        policy,
        limit,
        lease: LeaseTimes {
            silence: millis("lease.seconds", job.lease.seconds)?,
            progress: millis("lease.progress_seconds", job.lease.progress_seconds)?,
            target: millis("lease.target_seconds", job.lease.target_seconds)?,
        },
        evaluate_every: job.evaluation.versions.filter(|versions| *versions > 0),
        attempts: 5,
        // Local training forgets what other shards have, and so does any where each has its own
        // labels. Elsewhere slots are the parts of one larger batch, which lies in one shard.
        turns: exchanges_models(spec)? || job.data.split == "label",
    };
    Run::new(plan.clone(), 0).map_err(|error| error.to_string())?;
    Ok(plan)
}

/// The numbers of a run.
fn model(spec: &RunSpec, frame: Frame) -> Result<Model, String> {
    let settings: OptimiserSettings =
        serde_json::from_value(Value::Object(spec.job.optimiser.clone()))
            .map_err(|error| format!("optimiser: {error}"))?;
    let plan = plan(spec)?;
    let rules = if exchanges_models(spec)? {
        let outer: OuterSettings = serde_json::from_value(Value::Object(spec.job.outer.clone()))
            .map_err(|error| format!("outer: {error}"))?;
        let outer = outer.optimiser(plan.versions()).map_err(|error| error.to_string())?;
        // With one round the schedule follows local steps, of which there is some number.
        let local_steps = averages_once(spec).then_some(u64::MAX);
        Rules::Models { inner: settings, outer, local_steps }
    } else {
        Rules::Gradients(settings)
    };
    Model::new(&spec.schema, rules, plan.versions(), frame)
}

fn exchanges_models(spec: &RunSpec) -> Result<bool, String> {
    match spec.job.run.exchange.as_str() {
        "gradients" => Ok(false),
        "models" => Ok(true),
        other => {
            Err(format!("run.exchange is `{other}`; this hive knows `gradients` and `models`"))
        }
    }
}

fn averages_once(spec: &RunSpec) -> bool {
    spec.job.policy.get("rounds").and_then(Value::as_str) == Some("once")
}
