//! Counts and gauges under Prometheus' names and in its text form.

use std::fmt::Write;
use std::sync::atomic::{AtomicU64, Ordering};

use skep_wire::RunView;

/// What a run counts without asking its keeper.
#[derive(Default)]
pub(crate) struct Counters {
    pub(crate) contributions: AtomicU64,
    pub(crate) refused: AtomicU64,
    pub(crate) lapsed: AtomicU64,
    pub(crate) evaluations: AtomicU64,
    pub(crate) bytes_in: AtomicU64,
    pub(crate) bytes_out: AtomicU64,
    pub(crate) shard_bytes_out: AtomicU64,
    pub(crate) checkpoints: AtomicU64,
    pub(crate) checkpoint_failures: AtomicU64,
}

impl Counters {
    /// A shard went out.
    pub(crate) fn sent_shard(&self, bytes: u64) {
        Self::add(&self.bytes_out, bytes);
        Self::add(&self.shard_bytes_out, bytes);
    }

    pub(crate) fn add(counter: &AtomicU64, amount: u64) {
        counter.fetch_add(amount, Ordering::Relaxed);
    }
}

/// One family of a page of metrics.
struct Family<'page> {
    page: &'page mut String,
    name: &'static str,
}

impl<'page> Family<'page> {
    fn new(page: &'page mut String, name: &'static str, kind: &str, help: &str) -> Self {
        let _ = writeln!(page, "# HELP {name} {help}\n# TYPE {name} {kind}");
        Self { page, name }
    }

    fn sample(&mut self, run: &str, value: impl std::fmt::Display) {
        let _ = writeln!(self.page, "{}{{run=\"{run}\"}} {value}", self.name);
    }
}

/// The whole page. Run names need no escaping: they are plain words.
pub(crate) fn page(generation: u64, runs: &[(RunView, &Counters)]) -> String {
    let mut page = String::new();
    let _ = writeln!(
        page,
        "# HELP skep_build_info The version of the hive.\n# TYPE skep_build_info gauge\n\
         skep_build_info{{version=\"{}\"}} 1\n\
         # HELP skep_generation How often a hive has started on this store.\n\
         # TYPE skep_generation gauge\nskep_generation {generation}",
        env!("CARGO_PKG_VERSION")
    );
    type Count = fn(&Counters) -> &AtomicU64;
    let counts: [(&str, &str, Count); 9] = [
        ("skep_contributions_total", "Contributions accepted.", |c| &c.contributions),
        ("skep_contributions_refused_total", "Contributions refused.", |c| &c.refused),
        ("skep_leases_lapsed_total", "Leases that lapsed or failed.", |c| &c.lapsed),
        ("skep_evaluations_total", "Evaluation slices counted.", |c| &c.evaluations),
        ("skep_received_bytes_total", "Bytes of contributions received.", |c| &c.bytes_in),
        ("skep_sent_bytes_total", "Bytes of parameters and shards sent.", |c| &c.bytes_out),
        ("skep_sent_shard_bytes_total", "Bytes of shards sent.", |c| &c.shard_bytes_out),
        ("skep_checkpoints_total", "Checkpoints written.", |c| &c.checkpoints),
        ("skep_checkpoint_failures_total", "Checkpoints that failed.", |c| &c.checkpoint_failures),
    ];
    for (name, help, count) in counts {
        let mut family = Family::new(&mut page, name, "counter", help);
        for (run, counters) in runs {
            family.sample(&run.name, count(counters).load(Ordering::Relaxed));
        }
    }
    type Gauge = fn(&RunView) -> Option<f64>;
    let gauges: [(&str, &str, &str, Gauge); 11] = [
        ("skep_version", "counter", "Number of the newest version.", |r| {
            Some(r.version.number as f64)
        }),
        (
            "skep_durable_version",
            "gauge",
            "Number of the newest version that would survive a crash.",
            |r| Some(r.durable.number as f64),
        ),
        ("skep_epoch", "gauge", "Epoch under way, from 0.", |r| Some(r.epoch as f64)),
        ("skep_samples_total", "counter", "Samples applied.", |r| Some(r.samples as f64)),
        ("skep_samples_per_second", "gauge", "Samples applied per second, lately.", |r| {
            Some(r.rate)
        }),
        ("skep_skipped_positions", "gauge", "Positions given up.", |r| {
            Some(r.skipped.iter().map(|gap| gap.count).sum::<u64>() as f64)
        }),
        ("skep_workers", "gauge", "Workers heard of lately.", |r| Some(r.workers.len() as f64)),
        ("skep_running", "gauge", "1 while the run is running.", |r| {
            Some(f64::from(u8::from(!r.state.is_final())))
        }),
        ("skep_loss", "gauge", "Training loss, lately.", |r| r.loss),
        ("skep_validation_accuracy", "gauge", "Accuracy on the validation split.", |r| {
            r.validation.and_then(|v| v.accuracy)
        }),
        ("skep_test_accuracy", "gauge", "Accuracy of the final version on the test split.", |r| {
            r.test.and_then(|v| v.accuracy)
        }),
    ];
    for (name, kind, help, gauge) in gauges {
        let mut family = Family::new(&mut page, name, kind, help);
        for (run, _) in runs {
            if let Some(value) = gauge(run) {
                family.sample(&run.name, value);
            }
        }
    }
    page
}
