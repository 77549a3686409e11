//! The worker's loop: lease, pull, compute, push.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use skep_core::position;
use skep_data::Table;
use skep_learn::{Compute, Task};
use skep_wire::{
    ContributionKind, Encoding, Envelope, ErrorCode, EvaluationCounts, Frame, Layout, LeaseAnswer,
    LeaseKind, LeaseRequest, LeaseView, LogLine, RunView, ShardRef, Version,
};

use crate::heartbeat::Heartbeat;
use crate::local::{LocalTraining, own};
use crate::shards::ShardCache;
use crate::{Client, ClientError, ClientSettings, Pulled, WorkerError};

/// How a worker is set up.
pub struct WorkerSettings {
    /// Where the hive is.
    pub client: ClientSettings,
    /// The run to work on; any that is running where it is left out.
    pub run: Option<String>,
    /// The worker's name; made up where it is left out.
    pub name: Option<String>,
    /// How many bytes of shards to keep in memory.
    pub cache_bytes: u64,
    /// When the worker must be gone, if it must.
    pub until: Option<Instant>,
    /// The tasks this program knows.
    pub tasks: Vec<Arc<dyn Task>>,
}

/// How a worker ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkEnd {
    /// The run is done, or was ended by somebody.
    RunEnded,
    /// It was called off or its time was up, with work left.
    CalledOff,
}

/// Works until the run ends or the worker is called off.
pub fn work(settings: WorkerSettings) -> Result<WorkEnd, WorkerError> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| WorkerError::System(error.to_string()))?;
    let client = Client::new(settings.client.clone())?;
    let heartbeat = Heartbeat::start(&settings.client)?;
    let name = settings.name.clone().unwrap_or_else(made_up_name);
    let stop = settings.client.stop.clone();
    let mut worked = Vec::new();
    runtime.block_on(async {
        loop {
            let run = match choose_run(&client, &settings, &worked).await {
                Ok(Some(run)) => run,
                Ok(None) => return Ok(WorkEnd::RunEnded),
                Err(WorkerError::Client(ClientError::Stopped)) => return Ok(WorkEnd::CalledOff),
                Err(error) => return Err(error),
            };
            let mut session =
                Session::open(&client, &heartbeat, &settings, &name, stop.clone(), &run).await?;
            let end = session.work().await;
            heartbeat.release();
            match end {
                Err(WorkerError::Client(ClientError::Stopped)) => return Ok(WorkEnd::CalledOff),
                Ok(WorkEnd::RunEnded) if settings.run.is_none() => worked.push(run.name),
                other => return other,
            }
        }
    })
}

/// A name nobody else has: where, which process, and some randomness.
fn made_up_name() -> String {
    let host = std::env::var("HOSTNAME")
        .ok()
        .or_else(|| std::fs::read_to_string("/proc/sys/kernel/hostname").ok())
        .unwrap_or_default();
    let host: String = host.trim().chars().filter(char::is_ascii_alphanumeric).take(32).collect();
    let mut random = [0; 3];
    let _ = getrandom::fill(&mut random);
    let random: String = random.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("{}-{}-{random}", if host.is_empty() { "worker" } else { &host }, std::process::id())
}

async fn choose_run(
    client: &Client,
    settings: &WorkerSettings,
    worked: &[String],
) -> Result<Option<RunView>, WorkerError> {
    if let Some(name) = &settings.run {
        return Ok(Some(client.run(name).await?));
    }
    loop {
        let runs = client.runs().await?;
        let open = runs.iter().find(|run| !run.state.is_final() && !worked.contains(&run.name));
        if let Some(run) = open {
            return Ok(Some(client.run(&run.name).await?));
        }
        if !runs.is_empty() || !worked.is_empty() {
            return Ok(None);
        }
        tracing::info!("the hive has no run yet; waiting for one");
        for _ in 0..20 {
            if settings.client.stop.load(Ordering::Relaxed) {
                return Err(ClientError::Stopped.into());
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}

/// What this program can read, where the hive does not keep everything.
fn kept_shards(view: &RunView) -> Result<Option<Vec<String>>, WorkerError> {
    let shards = || view.manifest.shards();
    if shards().all(ShardRef::is_kept) {
        return Ok(None);
    }
    let kept: Vec<_> =
        shards().filter(|shard| shard.is_kept()).map(|shard| shard.hash.clone()).collect();
    if kept.is_empty() {
        let shard = shards().next().map(|shard| shard.name.clone()).unwrap_or_default();
        return Err(WorkerError::NotKept { run: view.name.clone(), shard });
    }
    Ok(Some(kept))
}

/// One worker's time with one run.
struct Session<'session> {
    client: &'session Client,
    heartbeat: &'session Heartbeat,
    name: &'session str,
    stop: Arc<AtomicBool>,
    until: Option<Instant>,
    run: String,
    view: RunView,
    encoding: Encoding,
    engine: String,
    compute: Box<dyn Compute>,
    version_layout: Arc<Layout>,
    wire_gradient_layout: Arc<Layout>,
    /// The parameters that `compute` holds.
    loaded: Option<Version>,
    /// The mean gradient of the contribution in the making; shared with the request that sends it.
    gradient: Arc<Frame>,
    /// The gradient of one batch, where a contribution has several.
    scratch: Option<Frame>,
    /// Where models are exchanged: the copy that is trained here.
    local: Option<LocalTraining>,
    batch: Table,
    rows: Vec<u64>,
    shards: ShardCache,
    /// The shards that the hive keeps, where it does not keep all.
    only: Option<Vec<String>>,
    busy: Duration,
    waited: Duration,
}

impl<'session> Session<'session> {
    async fn open(
        client: &'session Client,
        heartbeat: &'session Heartbeat,
        settings: &WorkerSettings,
        name: &'session str,
        stop: Arc<AtomicBool>,
        view: &RunView,
    ) -> Result<Self, WorkerError> {
        let kind = &view.job.model.kind;
        let task = settings.tasks.iter().find(|task| task.name() == kind).ok_or_else(|| {
            let known: Vec<_> = settings.tasks.iter().map(|task| task.name()).collect();
            WorkerError::UnknownModel {
                run: view.name.clone(),
                kind: kind.clone(),
                known: known.join(", "),
            }
        })?;
        let compute = task.compute(&view.job)?;
        if *compute.schema() != view.schema {
            return Err(WorkerError::OtherSchema { run: view.name.clone(), kind: kind.clone() });
        }
        let layout = |result: Result<Layout, skep_wire::WireError>| {
            result.map(Arc::new).map_err(ClientError::from)
        };
        let encoding = view.job.train.encoding;
        let version_layout = layout(Layout::of_version(&view.schema, Encoding::F32))?;
        let gradient_layout = layout(Layout::of_gradient(&view.schema, Encoding::F32))?;
        let wire_gradient_layout = layout(Layout::of_gradient(&view.schema, encoding))?;
        let local = LocalTraining::of(view, &version_layout, &gradient_layout)?;
        let several = view.job.train.every > 1 || local.is_some();
        let session = Self {
            client,
            heartbeat,
            name,
            stop,
            until: settings.until,
            run: view.name.clone(),
            view: view.clone(),
            encoding,
            engine: format!("skep {} burn-flex", env!("CARGO_PKG_VERSION")),
            compute,
            version_layout,
            wire_gradient_layout,
            loaded: None,
            gradient: Arc::new(Frame::zeros(gradient_layout.clone())),
            scratch: several.then(|| Frame::zeros(gradient_layout)),
            local,
            batch: Table::default(),
            rows: Vec::new(),
            shards: ShardCache::new(settings.cache_bytes),
            only: kept_shards(view)?,
            busy: Duration::ZERO,
            waited: Duration::ZERO,
        };
        tracing::info!(run = session.run, worker = name, "joined at version {}", view.version);
        session.say("info", &format!("joined at version {}", view.version)).await;
        Ok(session)
    }

    async fn say(&self, level: &str, message: &str) {
        let line = LogLine {
            time: 0,
            worker: self.name.to_owned(),
            level: level.to_owned(),
            message: message.to_owned(),
        };
        let _ = self.client.log(&self.run, &[line]).await;
    }

    fn called_off(&self) -> bool {
        self.stop.load(Ordering::Relaxed) || self.until.is_some_and(|until| Instant::now() >= until)
    }

    async fn work(&mut self) -> Result<WorkEnd, WorkerError> {
        loop {
            if self.called_off() {
                self.say("info", "called off").await;
                return Ok(WorkEnd::CalledOff);
            }
            let answer = self.ask().await;
            match answer {
                Ok(LeaseAnswer::Lease(lease)) => {
                    let every = Duration::from_secs_f64(lease.renew_seconds.clamp(0.05, 600.0));
                    self.heartbeat.hold(&self.run, lease.id, every);
                    let done = match lease.kind {
                        LeaseKind::Evaluate => self.evaluate(&lease).await,
                        _ if self.local.is_some() => self.train_locally(&lease).await,
                        _ => self.train(&lease).await,
                    };
                    self.heartbeat.release();
                    self.settle(&lease, done).await?;
                }
                Ok(LeaseAnswer::Wait { seconds, reason }) => {
                    tracing::debug!(run = self.run, worker = self.name, "waiting: {reason}");
                    let pause = Duration::from_secs_f64(seconds.clamp(0.01, 2.0));
                    if self.until.is_some_and(|until| Instant::now() + pause > until) {
                        return Ok(WorkEnd::CalledOff);
                    }
                    tokio::time::sleep(pause).await;
                }
                Ok(LeaseAnswer::Done { .. } | LeaseAnswer::Stopped { .. }) => {
                    self.say("info", "the run has ended").await;
                    return Ok(WorkEnd::RunEnded);
                }
                // The run was deleted.
                Err(error) if error.code() == Some(ErrorCode::NotFound) => {
                    return Ok(WorkEnd::RunEnded);
                }
                Err(error) => return Err(error.into()),
            }
        }
    }

    async fn ask(&mut self) -> Result<LeaseAnswer, ClientError> {
        let start = Instant::now();
        let left = self.until.map(|until| until.saturating_duration_since(start).as_secs_f64());
        let all = (self.busy + self.waited).as_secs_f64();
        let request = LeaseRequest {
            worker: self.name.to_owned(),
            engine: self.engine.clone(),
            seconds_left: left,
            has: self.shards.ids(),
            only: self.only.clone(),
            kinds: vec![],
            wait: left.map_or(20.0, |left| left.min(20.0)),
            waiting: if all > 0.0 { self.waited.as_secs_f64() / all } else { 0.0 },
        };
        let answer = self.client.lease(&self.run, &request).await;
        self.note_wait(start);
        answer
    }

    /// Shares of time are of the last seconds, not of all time.
    fn note_wait(&mut self, since: Instant) {
        self.waited += since.elapsed();
        if self.busy + self.waited > Duration::from_secs(10) {
            self.busy /= 2;
            self.waited /= 2;
        }
    }

    /// What to do with a lease whose work ended this way.
    async fn settle(
        &mut self,
        lease: &LeaseView,
        done: Result<(), WorkerError>,
    ) -> Result<(), WorkerError> {
        let Err(error) = done else { return Ok(()) };
        match &error {
            WorkerError::Client(ClientError::Stopped) => {
                let _ = self.client.give_back(&self.run, lease.id, None).await;
                self.say("info", "called off; the lease is given back").await;
                Err(error)
            }
            WorkerError::Client(refused) => match refused.code() {
                // Somebody else has the work now, or nobody needs it: take another lease.
                Some(
                    ErrorCode::LeaseGone
                    | ErrorCode::OtherGeneration
                    | ErrorCode::TooStale
                    | ErrorCode::NotRunning
                    | ErrorCode::NotFound,
                ) => {
                    tracing::debug!(run = self.run, worker = self.name, "lease lost: {refused}");
                    Ok(())
                }
                Some(ErrorCode::NotFinite) => self.fail(lease, &error.to_string()).await,
                _ => Err(error),
            },
            WorkerError::Learn(failure) => self.fail(lease, &failure.to_string()).await,
            _ => Err(error),
        }
    }

    async fn fail(&self, lease: &LeaseView, reason: &str) -> Result<(), WorkerError> {
        tracing::warn!(
            run = self.run,
            worker = self.name,
            "positions {}..{}: {reason}",
            lease.first,
            lease.first + lease.count
        );
        self.say("warn", reason).await;
        let _ = self.client.give_back(&self.run, lease.id, Some(reason.to_owned())).await;
        Ok(())
    }

    fn load(&mut self, pulled: Pulled) -> Result<(), WorkerError> {
        let version = pulled.version;
        let frame = pulled.frame(&self.version_layout)?;
        self.compute.load(&frame)?;
        self.loaded = Some(version);
        if let Some(local) = &mut self.local {
            local.pulled(frame);
        }
        Ok(())
    }

    async fn pull(&mut self, version: Option<Version>) -> Result<(), WorkerError> {
        let start = Instant::now();
        // What is measured is exactly what is stored: no rounding on the way.
        let encoding = if version.is_some() { Encoding::F32 } else { self.encoding };
        let pulled = self.client.parameters(&self.run, version, encoding).await?;
        self.note_wait(start);
        self.load(pulled)
    }

    /// Brings home the counts of a slice on exactly the lease's version.
    async fn evaluate(&mut self, lease: &LeaseView) -> Result<(), WorkerError> {
        let exact = self.encoding == Encoding::F32 && self.loaded == Some(lease.base);
        if !exact {
            self.pull(Some(lease.base)).await?;
        }
        let table = self.shard(lease).await?;
        let start = Instant::now();
        let mut counts = EvaluationCounts { loss_sum: 0.0, correct: Some(0) };
        let mut offset = lease.offset;
        let end = lease.offset + lease.count;
        while offset < end {
            if self.stop.load(Ordering::Relaxed) {
                return Err(ClientError::Stopped.into());
            }
            let until = end.min(offset + self.view.job.train.batch.clamp(1, 256));
            self.rows.clear();
            self.rows.extend(offset..until);
            table.gather_into(&self.rows, &mut self.batch)?;
            let more = self.compute.evaluate(&self.batch)?;
            counts.loss_sum += more.loss_sum;
            counts.correct = counts.correct.zip(more.correct).map(|(sum, more)| sum + more);
            offset = until;
        }
        self.busy += start.elapsed();
        if !counts.loss_sum.is_finite() {
            return self.fail(lease, &format!("the loss is {}", counts.loss_sum)).await;
        }
        let envelope = self.envelope(lease, 0, lease.first, lease.count);
        let envelope = Envelope { kind: ContributionKind::Evaluation, ..envelope };
        let body =
            serde_json::to_vec(&counts).map_err(|error| WorkerError::System(error.to_string()))?;
        if self.encoding != Encoding::F32 {
            // Training goes on from parameters of the run's encoding.
            self.loaded = None;
        }
        self.client.contribute(&self.run, &envelope, Bytes::from(body)).await?;
        Ok(())
    }

    fn envelope(&self, lease: &LeaseView, sequence: u64, first: u64, count: u64) -> Envelope {
        Envelope {
            lease: lease.id,
            sequence,
            first,
            count,
            base: match lease.kind {
                LeaseKind::Train => self.loaded.unwrap_or(lease.base),
                _ => lease.base,
            },
            kind: ContributionKind::Gradient,
            encoding: self.encoding,
            loss: None,
            want: None,
            have: self.loaded,
            without: None,
        }
    }

    async fn shard(&mut self, lease: &LeaseView) -> Result<Arc<Table>, WorkerError> {
        let shards = self.view.manifest.split(lease.split);
        let shard = shards.get(lease.shard as usize).ok_or_else(|| {
            ClientError::Answer(format!(
                "the lease names shard {}, which is not there",
                lease.shard
            ))
        })?;
        let start = Instant::now();
        let table = self.shards.get(self.client, &self.run, shard).await?;
        self.note_wait(start);
        Ok(table)
    }

    /// Pulls the newest version, unless what is there is as new as the lease's base.
    async fn refresh(&mut self, lease: &LeaseView) -> Result<(), WorkerError> {
        let fresh = self.loaded.is_some_and(|loaded| {
            loaded.generation == lease.base.generation && loaded.number >= lease.base.number
        });
        if !fresh {
            self.pull(None).await?;
        }
        Ok(())
    }

    /// Trains on a slice by itself and brings home what that changed.
    async fn train_locally(&mut self, lease: &LeaseView) -> Result<(), WorkerError> {
        self.refresh(lease).await?;
        let table = self.shard(lease).await?;
        let start = Instant::now();
        let batch = self.view.job.train.batch.max(1);
        let base = self.loaded.unwrap_or(lease.base);
        let Some(local) = &mut self.local else { return Ok(()) };
        let epochs = local.epochs();
        local.begin(base.number, epochs.saturating_mul(lease.count.div_ceil(batch)))?;
        let mut loss = 0.0;
        for again in 0..epochs {
            let mut taken = 0;
            while taken < lease.count {
                if self.called_off() {
                    return Err(ClientError::Stopped.into());
                }
                if self.heartbeat.is_lost() {
                    return self.load_base();
                }
                let size = batch.min(lease.count - taken);
                let (more, finite) =
                    self.local_step(lease, &table, lease.epoch + again, taken, size)?;
                if !finite || !more.is_finite() {
                    self.load_base()?;
                    return self
                        .fail(lease, &format!("local training diverged: loss {more}"))
                        .await;
                }
                loss += more * size as f64;
                taken += size;
            }
        }
        loss /= (lease.count * epochs) as f64;
        if let Some(local) = &self.local {
            local.difference(own(&mut self.gradient))?;
        }
        self.load_base()?;
        self.busy += start.elapsed();
        let mut envelope = self.envelope(lease, 0, lease.first, lease.count);
        envelope.kind = ContributionKind::Model;
        envelope.loss = Some(loss);
        envelope.want = Some(self.encoding);
        let body = self.gradient_body()?;
        let start = Instant::now();
        let (_, pulled) = self.client.contribute(&self.run, &envelope, body).await?;
        self.note_wait(start);
        pulled.map_or(Ok(()), |pulled| self.load(pulled))
    }

    /// One local step on the samples from an offset on; gives their mean loss, and whether all
    /// stayed finite.
    fn local_step(
        &mut self,
        lease: &LeaseView,
        table: &Table,
        epoch: u64,
        taken: u64,
        size: u64,
    ) -> Result<(f64, bool), WorkerError> {
        let (Some(local), Some(scratch)) = (&mut self.local, &mut self.scratch) else {
            return Ok((0.0, true));
        };
        let (seed, samples) = (self.view.job.run.seed, table.rows() as u64);
        let offset = lease.offset + taken;
        self.rows.clear();
        self.rows.extend(
            (offset..offset + size)
                .map(|offset| position::sample(seed, epoch, lease.shard, samples, offset)),
        );
        table.gather_into(&self.rows, &mut self.batch)?;
        self.compute.load(local.parameters()?)?;
        let noise = position::noise(seed, epoch, lease.first + taken);
        let loss = self.compute.gradient(&self.batch, noise, scratch)?;
        Ok((loss, local.step(scratch)?))
    }

    /// What is computed on is the version that was pulled again.
    fn load_base(&mut self) -> Result<(), WorkerError> {
        if let Some(base) = self.local.as_ref().and_then(LocalTraining::base) {
            self.compute.load(base)?;
        }
        Ok(())
    }

    /// Works through a slice, contribution by contribution.
    async fn train(&mut self, lease: &LeaseView) -> Result<(), WorkerError> {
        self.refresh(lease).await?;
        let table = self.shard(lease).await?;
        let samples = table.rows() as u64;
        let seed = self.view.job.run.seed;
        let mut done = 0;
        let mut sequence = 0;
        while done < lease.count {
            let count = lease.chunk.min(lease.count - done);
            let start = Instant::now();
            let mut loss = 0.0;
            let mut taken = 0;
            self.compute.begin()?;
            while taken < count {
                if self.called_off() {
                    return Err(ClientError::Stopped.into());
                }
                if self.heartbeat.is_lost() {
                    return Ok(());
                }
                let size = self.view.job.train.batch.min(count - taken);
                let offset = lease.offset + done + taken;
                self.rows.clear();
                self.rows.extend((offset..offset + size).map(|offset| {
                    position::sample(seed, lease.epoch, lease.shard, samples, offset)
                }));
                table.gather_into(&self.rows, &mut self.batch)?;
                let noise = position::noise(seed, lease.epoch, lease.first + done + taken);
                loss += self.batch_gradient(noise, size, taken)? * size as f64;
                taken += size;
            }
            loss /= count as f64;
            self.finish_mean(count);
            self.busy += start.elapsed();
            if !loss.is_finite() {
                return self.fail(lease, &format!("the loss is {loss}")).await;
            }
            let mut envelope = self.envelope(lease, sequence, lease.first + done, count);
            envelope.loss = Some(loss);
            envelope.want = Some(self.encoding);
            let body = self.gradient_body()?;
            let start = Instant::now();
            let (_, pulled) = self.client.contribute(&self.run, &envelope, body).await?;
            self.note_wait(start);
            if let Some(pulled) = pulled {
                self.load(pulled)?;
            }
            done += count;
            sequence += 1;
        }
        Ok(())
    }

    /// Adds one batch to the contribution in the making; gives its mean loss.
    fn batch_gradient(&mut self, noise: u64, size: u64, taken: u64) -> Result<f64, WorkerError> {
        // The request that sent the last contribution has ended, so nobody else holds the frame.
        let gradient = own(&mut self.gradient);
        let Some(scratch) = &mut self.scratch else {
            return Ok(self.compute.gradient(&self.batch, noise, gradient)?);
        };
        let loss = self.compute.gradient(&self.batch, noise, scratch)?;
        let weight = size as f32;
        if taken == 0 {
            gradient.data_mut().copy_from_slice(scratch.data());
            gradient.floats_mut().iter_mut().for_each(|value| *value *= weight);
        } else {
            let sums = gradient.floats_mut().iter_mut().zip(scratch.floats());
            sums.for_each(|(sum, value)| *sum += value * weight);
        }
        self.keep_buffers();
        Ok(loss)
    }

    /// Buffers are values, not sums: the last batch's count.
    fn keep_buffers(&mut self) {
        let Some(scratch) = &self.scratch else { return };
        let Some(gradient) = Arc::get_mut(&mut self.gradient) else { return };
        for tensor in self.view.schema.tensors() {
            if matches!(tensor.role, skep_wire::Role::Buffer { .. })
                && let (Some(from), Some(into)) =
                    (scratch.tensor(&tensor.name), gradient.tensor_mut(&tensor.name))
            {
                into.copy_from_slice(from);
            }
        }
    }

    /// Turns the weighted sum of several batches into their mean.
    fn finish_mean(&mut self, count: u64) {
        if self.scratch.is_none() {
            return;
        }
        let factor = 1.0 / count as f32;
        if let Some(gradient) = Arc::get_mut(&mut self.gradient) {
            for tensor in self.view.schema.tensors() {
                if matches!(tensor.role, skep_wire::Role::Trainable { .. })
                    && let Some(values) = gradient.floats_of_mut(&tensor.name)
                {
                    values.iter_mut().for_each(|value| *value *= factor);
                }
            }
        }
    }

    fn gradient_body(&self) -> Result<Bytes, WorkerError> {
        if self.encoding == Encoding::F32 {
            return Ok(Bytes::from_owner(SharedFrame(self.gradient.clone())));
        }
        let narrow =
            self.gradient.convert(&self.wire_gradient_layout).map_err(ClientError::from)?;
        Ok(Bytes::from_owner(SharedFrame(Arc::new(narrow))))
    }
}

/// Lets a request's body be the frame itself.
struct SharedFrame(Arc<Frame>);

impl AsRef<[u8]> for SharedFrame {
    fn as_ref(&self) -> &[u8] {
        self.0.as_bytes()
    }
}
