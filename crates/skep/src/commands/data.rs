//! `skep data`: gets data, shows what is in it, and cuts or copies it into folders that can be
//! trained on elsewhere.

use std::process::ExitCode;
use std::sync::Arc;

use clap::{Args, Subcommand, ValueEnum};
use serde_json::json;
use skep_data::split::{Description, KeptSplit, SplitSettings, Writer};
use skep_data::table_file::TableForm;
use skep_data::{Dataset, PrepareSettings, RowSplit, Store};
use skep_learn::Task;

use crate::cli::runtime;
use crate::failure::Failure;
use crate::job_file::{self, JobFlags};
use crate::progress::{bar, reading, thousands};

mod fetch;
mod inspect;

/// What to do with data.
#[derive(Args, Clone, Debug)]
pub(crate) struct DataFlags {
    #[command(subcommand)]
    action: Action,
}

#[derive(Subcommand, Clone, Debug)]
enum Action {
    /// Download a public dataset from its home: checked, and resumed where it was cut
    Fetch(fetch::FetchFlags),
    /// Show what is in a dataset: counts, shapes, classes, lengths of texts
    Inspect(inspect::InspectFlags),
    /// Cut the training samples into disjoint shards that can be trained on one by one
    Split(SplitFlags),
    /// Write whole copies, for models that are trained apart on the same data
    Copy(CopyFlags),
}

/// Which data.
#[derive(Args, Clone, Debug)]
struct SourceFlags {
    /// The task whose data it is (mnist, imdb), or a job file
    #[arg(value_name = "TASK|JOB.toml")]
    task: String,
    /// The data, as for `skep train`; the built-in data where it is left out
    #[arg(long, value_name = "PATH")]
    data: Option<String>,
    /// The model, where a task has several
    #[arg(long, value_name = "KIND")]
    model: Option<String>,
    /// A setting of the job, such as model.settings.length=200; may be given several times
    #[arg(long = "set", value_name = "KEY=VALUE")]
    settings: Vec<String>,
}

impl SourceFlags {
    fn open(&self, tasks: &[Arc<dyn Task>]) -> Result<Dataset, Failure> {
        let flags = JobFlags {
            data: self.data.clone(),
            model: self.model.clone(),
            settings: self.settings.clone(),
            ..JobFlags::default()
        };
        let read = job_file::read(&self.task, &flags, tasks)?;
        let (task, mut job) = (read.task, read.job);
        let dataset = reading(&job.data.source, || task.dataset(&job))?;
        // Finds labels and words that no model of the task could learn.
        task.settle(&mut job, &dataset)?;
        Ok(dataset)
    }
}

/// Where to, and in which form.
#[derive(Args, Clone, Debug)]
struct OutFlags {
    /// The folder to write; created if it is not there
    #[arg(long, value_name = "DIR|URL")]
    out: String,
    /// The form of the files
    #[arg(long, value_enum, default_value = "npz")]
    format: Format,
    /// The share of the training samples that is held out to validate on, from 0 to below 1
    #[arg(long, value_name = "SHARE", default_value_t = 0.0)]
    validation: f64,
    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Format {
    /// numpy's: an array per column
    Npz,
    /// A tensor per column
    Safetensors,
    /// An archive of numpy arrays and a description
    #[value(name = "tar.gz")]
    TarGz,
}

impl From<Format> for TableForm {
    fn from(format: Format) -> Self {
        match format {
            Format::Npz => Self::Npz,
            Format::Safetensors => Self::Safetensors,
            Format::TarGz => Self::TarGz,
        }
    }
}

#[derive(Args, Clone, Debug)]
struct SplitFlags {
    #[command(flatten)]
    source: SourceFlags,
    /// How many shards
    #[arg(long, value_name = "N")]
    shards: usize,
    /// Which samples go together: any, or those of the same label (for non-IID experiments)
    #[arg(long, value_enum, default_value = "shuffled")]
    by: By,
    #[command(flatten)]
    out: OutFlags,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum By {
    /// Every shard looks like the whole
    Shuffled,
    /// A shard has few different labels
    Label,
}

#[derive(Args, Clone, Debug)]
struct CopyFlags {
    #[command(flatten)]
    source: SourceFlags,
    /// How many copies: DIR/copy-1, DIR/copy-2, …
    #[arg(long, value_name = "N")]
    copies: usize,
    #[command(flatten)]
    out: OutFlags,
}

pub(crate) fn data(flags: DataFlags, tasks: &[Arc<dyn Task>]) -> Result<ExitCode, Failure> {
    match flags.action {
        Action::Fetch(flags) => fetch::fetch(&flags),
        Action::Inspect(flags) => inspect::inspect(&flags, tasks),
        Action::Split(flags) => {
            let split = match flags.by {
                By::Shuffled => RowSplit::Shuffled,
                By::Label => RowSplit::Label,
            };
            let dataset = flags.source.open(tasks)?;
            write(&dataset, flags.shards, split, None, &flags.source.task, &flags.out)
        }
        Action::Copy(flags) if flags.copies == 0 => {
            Err(Failure::mistake("--copies must be 1 or more"))
        }
        Action::Copy(flags) => {
            let dataset = flags.source.open(tasks)?;
            let copies = Some(flags.copies);
            write(&dataset, 1, RowSplit::Shuffled, copies, &flags.source.task, &flags.out)
        }
    }
}

fn write(
    dataset: &Dataset,
    shards: usize,
    split: RowSplit,
    copies: Option<usize>,
    task: &str,
    flags: &OutFlags,
) -> Result<ExitCode, Failure> {
    let prepare =
        PrepareSettings { shards: Some(shards), copies: 1, validation: flags.validation, split };
    let settings = SplitSettings { prepare, form: flags.format.into() };
    let writer = Writer::new(dataset, &settings)?;
    let store = Store::open(&flags.out)?;
    let progress = bar(writer.files() as u64, "writing {wide_bar:.yellow/238} {pos}/{len} files");
    let written = runtime(1)?.block_on(writer.write(&store, copies, |_| progress.inc(1)));
    progress.finish_and_clear();
    let written = written?;
    if flags.json {
        println!("{}", json!({ "out": flags.out, "datasets": written }));
        return Ok(ExitCode::SUCCESS);
    }
    if let Some(description) = written.first() {
        let (text, first) = summary(description, &flags.out, copies);
        println!("{text}\ntrain on one with: skep train {task} --data {first}");
    }
    Ok(ExitCode::SUCCESS)
}

/// What was written, for people, and the first that can be trained on.
fn summary(description: &Description, out: &str, copies: Option<usize>) -> (String, String) {
    let files: Vec<_> = description.of(KeptSplit::Train).collect();
    let (fewest, most) = files.iter().fold((u64::MAX, 0), |(fewest, most), file| {
        (fewest.min(file.samples), most.max(file.samples))
    });
    let each = if fewest == most {
        thousands(most)
    } else {
        format!("{} to {}", thousands(fewest), thousands(most))
    };
    let mut text = match copies {
        None => format!("{} shards of {each} training samples", files.len()),
        Some(1) => format!("1 copy of {each} training samples"),
        Some(copies) => format!("{copies} copies of {each} training samples"),
    };
    for split in [KeptSplit::Validation, KeptSplit::Test] {
        let samples = description.samples(split);
        if samples > 0 {
            text.push_str(&format!(", {} {split} samples", thousands(samples)));
        }
    }
    let bytes: u64 = description.files.iter().map(|file| file.bytes).sum();
    text.push_str(&format!(
        "; {} in {out}",
        indicatif::HumanBytes(bytes * copies.unwrap_or(1) as u64)
    ));
    let first = match copies {
        None => format!("{out}/{}", files.first().map_or("", |file| &file.path)),
        Some(_) => format!("{out}/copy-1"),
    };
    (text, first)
}
