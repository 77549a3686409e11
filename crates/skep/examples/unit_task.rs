//! A task whose result proves that every sample counted exactly once: the whole command line, a
//! model without an engine.
//!
//! There is one tensor `x` with a coordinate per sample, all 0 at version 0, and the gradient of
//! sample `i` is the `i`-th unit vector. So a coordinate says how often its sample was applied: with
//! plain sgd of rate `r`, `E` epochs and versions of `s` samples it ends at `-r * E / s`, and with
//! powers of two everywhere that is exact. A sample that was lost or applied twice shows at once.
//! `tests/exactly_once.rs` kills hives and workers of this program and then looks at `x`.
//!
//! ```sh
//! cargo run --example unit_task -- train unit --data unit:4096 --epochs 4
//! ```
//!
//! `UNIT_SLEEP_MS` makes each batch take so many milliseconds, so that a kill hits work in flight.

use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use serde_json::{Map, Value, json};
use skep::{
    Column, Compute, DataError, Dataset, Dtype, Encoding, EvaluationCounts, Frame, Job, Layout,
    LearnError, Role, Schema, Table, Task, TensorSpec,
};

fn main() -> ExitCode {
    skep::main(vec![Arc::new(UnitTask)])
}

struct UnitTask;

/// The number of samples in `unit:4096`.
fn samples(source: &str) -> Result<usize, LearnError> {
    let count = source.strip_prefix("unit:").and_then(|text| text.parse().ok());
    count.filter(|count| (1..=1 << 24).contains(count)).ok_or_else(|| {
        LearnError::Data(DataError::Dataset {
            source_name: source.to_owned(),
            reason: "give the number of samples, such as unit:4096".to_owned(),
        })
    })
}

fn numbered(rows: usize) -> Result<Table, DataError> {
    let bytes = (0..rows as i64).flat_map(i64::to_le_bytes).collect();
    Table::new(vec![Column { name: "index".into(), dtype: Dtype::I64, shape: vec![], bytes }])
}

fn settings(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(settings) => settings,
        _ => Map::new(),
    }
}

impl Task for UnitTask {
    fn name(&self) -> &str {
        "unit"
    }

    fn about(&self) -> &str {
        "counts how often each sample is applied"
    }

    fn defaults(&self) -> Job {
        let mut job = Job {
            policy: settings(json!({ "kind": "batch", "size": 2 })),
            optimiser: settings(json!({ "kind": "sgd", "rate": 1.0 })),
            ..Job::default()
        };
        job.model.kind = "unit".to_owned();
        job.data.source = "unit:4096".to_owned();
        job.data.shards = Some(8);
        job.data.validation = 0.0;
        job.train.batch = 16;
        job
    }

    fn dataset(&self, job: &Job) -> Result<Dataset, LearnError> {
        let source = &job.data.source;
        let train = numbered(samples(source)?)?;
        Ok(Dataset {
            source: source.to_owned(),
            train,
            validation: None,
            test: numbered(16)?,
            assets: vec![],
        })
    }

    fn compute(&self, job: &Job) -> Result<Box<dyn Compute>, LearnError> {
        let schema = Schema::new(vec![TensorSpec {
            name: "x".to_owned(),
            dtype: Dtype::F32,
            shape: vec![samples(&job.data.source)?],
            role: Role::trainable(),
        }])?;
        let millis = std::env::var("UNIT_SLEEP_MS").ok().and_then(|text| text.parse().ok());
        let pause = Duration::from_millis(millis.unwrap_or(0));
        Ok(Box::new(UnitCompute { schema, pause }))
    }
}

struct UnitCompute {
    schema: Schema,
    pause: Duration,
}

impl Compute for UnitCompute {
    fn schema(&self) -> &Schema {
        &self.schema
    }

    fn initial(&self, _seed: u64) -> Result<Frame, LearnError> {
        Ok(Frame::zeros(Arc::new(Layout::of_version(&self.schema, Encoding::F32)?)))
    }

    fn load(&mut self, _parameters: &Frame) -> Result<(), LearnError> {
        Ok(())
    }

    fn gradient(
        &mut self,
        batch: &Table,
        _seed: u64,
        gradient: &mut Frame,
    ) -> Result<f64, LearnError> {
        std::thread::sleep(self.pause);
        let indices = batch.require("index", Dtype::I64, &[])?.i64s()?;
        let values = gradient.floats_mut();
        values.fill(0.0);
        for &index in indices.iter() {
            values[index as usize] += 1.0 / indices.len() as f32;
        }
        Ok(1.0)
    }

    fn evaluate(&mut self, batch: &Table) -> Result<EvaluationCounts, LearnError> {
        let rows = batch.rows() as u64;
        Ok(EvaluationCounts { loss_sum: rows as f64, correct: Some(rows) })
    }
}
