//! `skep data inspect`: what is in a dataset, before anyone trains on it.

use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use clap::Args;
use serde_json::{Value, json};
use skep_data::split::{self, Description};
use skep_data::table_file::ColumnKind;
use skep_data::{Dataset, Table, Vocabulary, classes};
use skep_learn::Task;
use skep_wire::Dtype;

use crate::failure::Failure;
use crate::job_file::{self, JobFlags};
use crate::progress::{reading, thousands};

/// What to look at.
#[derive(Args, Clone, Debug)]
pub(crate) struct InspectFlags {
    /// A folder or file, a split dataset, one of its shards, or a task for its built-in data
    #[arg(value_name = "PATH|TASK")]
    what: String,
    /// The task to read it as, where several could
    #[arg(long, value_name = "TASK")]
    task: Option<String>,
    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
}

/// Wide enough for a terminal of 80 columns.
const BAR: usize = 36;

/// More classes are summed up.
const MOST_CLASSES: usize = 30;

const LENGTH_BINS: usize = 8;

pub(crate) fn inspect(flags: &InspectFlags, tasks: &[Arc<dyn Task>]) -> Result<ExitCode, Failure> {
    let (dataset, description) = reading(&flags.what, || open(flags, tasks))?;
    let report = Report::of(&dataset, description)?;
    if flags.json {
        println!("{}", report.json());
    } else {
        print!("{}", report.text());
    }
    Ok(ExitCode::SUCCESS)
}

fn open(
    flags: &InspectFlags,
    tasks: &[Arc<dyn Task>],
) -> Result<(Dataset, Option<Description>), Failure> {
    let path = Path::new(&flags.what);
    if !path.exists() && flags.task.is_none() {
        let read = job_file::read(&flags.what, &JobFlags::default(), tasks).map_err(|_| {
            Failure::mistake(format!("`{}` is neither there nor a task", flags.what))
                .hint("give a folder or file, or a task such as mnist")
        })?;
        return Ok((read.task.dataset(&read.job)?, None));
    }
    if let Some((dataset, description)) = split::open_described(&flags.what)? {
        return Ok((dataset, Some(description)));
    }
    // `mnist` could be a folder too.
    let source =
        if flags.what.contains('/') { flags.what.clone() } else { format!("./{}", flags.what) };
    let with = |task: &str| {
        let flags = JobFlags { data: Some(source.clone()), ..JobFlags::default() };
        let read = job_file::read(task, &flags, tasks)?;
        Ok::<_, Failure>(read.task.dataset(&read.job)?)
    };
    if let Some(task) = &flags.task {
        return Ok((with(task)?, None));
    }
    let mut troubles = Vec::new();
    let mut tried: Vec<String> = Vec::new();
    for task in tasks {
        // Models of the same data read it alike.
        let data = task.defaults().data.source;
        if tried.contains(&data) {
            continue;
        }
        match with(task.name()) {
            Ok(dataset) => return Ok((dataset, None)),
            Err(trouble) => troubles.push(format!("as {data}: {}", trouble.message)),
        }
        tried.push(data);
    }
    Err(Failure::mistake(format!("`{}` cannot be read\n  {}", flags.what, troubles.join("\n  ")))
        .hint("say what it is with --task, such as --task imdb"))
}

/// A class with its training, validation and test samples.
struct Class {
    label: i64,
    name: String,
    counts: [u64; 3],
}

struct Report<'dataset> {
    dataset: &'dataset Dataset,
    description: Option<Description>,
    classes: Vec<Class>,
    /// Numbers of words that count, of all training texts; empty where there are none.
    lengths: Vec<usize>,
    words: Option<usize>,
}

impl<'dataset> Report<'dataset> {
    fn of(dataset: &'dataset Dataset, description: Option<Description>) -> Result<Self, Failure> {
        let names = classes::names(dataset)?.unwrap_or_default();
        let mut found: Vec<Class> = Vec::new();
        let sets = [Some(&dataset.train), dataset.validation.as_ref(), Some(&dataset.test)];
        for (set, table) in sets.into_iter().enumerate() {
            for (label, count) in table.and_then(classes::counts).unwrap_or_default() {
                let at = found.iter().position(|class| class.label >= label).unwrap_or(found.len());
                if found.get(at).is_none_or(|class| class.label != label) {
                    let name = usize::try_from(label).ok().and_then(|at| names.get(at)).cloned();
                    let name = name.unwrap_or_else(|| label.to_string());
                    found.insert(at, Class { label, name, counts: [0; 3] });
                }
                found[at].counts[set] += count;
            }
        }
        let vocabulary = dataset.assets.iter().find(|asset| asset.name == Vocabulary::ASSET);
        let words = match vocabulary {
            Some(asset) => Some(Vocabulary::parse(&asset.name, &asset.bytes)?.words().len()),
            None => None,
        };
        let lengths = lengths(&dataset.train);
        Ok(Self { dataset, description, classes: found, lengths, words })
    }

    fn sets(&self) -> Vec<(&'static str, &Table)> {
        let validation = self.dataset.validation.as_ref().map(|table| ("validation", table));
        let all =
            [Some(("train", &self.dataset.train)), validation, Some(("test", &self.dataset.test))];
        all.into_iter().flatten().collect()
    }

    fn json(&self) -> Value {
        let sets: serde_json::Map<_, _> = self
            .sets()
            .iter()
            .map(|(name, table)| ((*name).to_owned(), json!(table.rows())))
            .collect();
        let classes: Vec<_> = self
            .classes
            .iter()
            .map(|class| {
                let [train, validation, test] = class.counts;
                json!({ "label": class.label, "name": class.name,
                        "train": train, "validation": validation, "test": test })
            })
            .collect();
        let mut report = json!({
            "source": self.dataset.source,
            "samples": sets,
            "row_bytes": self.dataset.train.row_bytes(),
            "columns": ColumnKind::of(&self.dataset.train),
            "classes": classes,
            "assets": self.dataset.assets.iter().map(|asset| &asset.name).collect::<Vec<_>>(),
        });
        if let (Some(shortest), Some(longest)) = (self.lengths.first(), self.lengths.last()) {
            report["lengths"] = json!({
                "shortest": shortest, "median": self.lengths[self.lengths.len() / 2],
                "longest": longest, "mean": mean(&self.lengths),
            });
        }
        if let Some(words) = self.words {
            report["words"] = json!(words);
        }
        if let Some(description) = &self.description {
            report["split"] = json!(description.split);
            report["files"] = json!(description.files);
            if let Some(copy) = description.copy {
                report["copy"] = json!(copy);
            }
        }
        report
    }

    fn text(&self) -> String {
        let mut text = format!("{}\n", self.dataset.source);
        if let Some(description) = &self.description {
            let by = format!("{:?}", description.split).to_lowercase();
            text.push_str(&format!("  split {by}, from {}", description.source));
            if let Some(copy) = description.copy {
                text.push_str(&format!(", copy {} of {}", copy.number, copy.of));
            }
            text.push('\n');
        }
        for (name, table) in self.sets() {
            let bytes = (table.rows() * table.row_bytes()) as u64;
            let (rows, bytes) = (thousands(table.rows() as u64), indicatif::HumanBytes(bytes));
            text.push_str(&format!("  {name:<11} {rows:>9} samples  {bytes}\n"));
        }
        text.push_str("\ncolumns\n");
        for column in ColumnKind::of(&self.dataset.train) {
            let (dtype, shape) = (format!("{:?}", column.dtype), column.shape);
            text.push_str(&format!("  {:<11} {dtype:<5} {shape:?}\n", column.name));
        }
        if !self.classes.is_empty() && self.classes.len() <= MOST_CLASSES {
            text.push_str("\nclasses        train      test\n");
            let most = self.classes.iter().map(|class| class.counts[0]).max().unwrap_or(0);
            for class in &self.classes {
                let name: String = class.name.chars().take(11).collect();
                let [train, _, test] = class.counts;
                let (shown, tested) = (thousands(train), thousands(test));
                let bar = blocks(train, most);
                text.push_str(&format!("  {name:<11} {shown:>7} {tested:>9}  {bar}\n"));
            }
        } else if !self.classes.is_empty() {
            text.push_str(&format!("\n{} classes\n", self.classes.len()));
        }
        text.push_str(&self.lengths_text());
        if let Some(description) = &self.description {
            text.push_str("\nfiles, all of them sound\n");
            for file in &description.files {
                let (rows, bytes) = (thousands(file.samples), indicatif::HumanBytes(file.bytes));
                text.push_str(&format!("  {:<32} {rows:>9} samples  {bytes}\n", file.path));
            }
        }
        text
    }

    fn lengths_text(&self) -> String {
        let (Some(&shortest), Some(&longest)) = (self.lengths.first(), self.lengths.last()) else {
            return String::new();
        };
        let median = self.lengths[self.lengths.len() / 2];
        let mut text = format!(
            "\nwords of a training text: {shortest} to {longest}, median {median}, mean {:.0}",
            mean(&self.lengths)
        );
        if let Some(words) = self.words {
            text.push_str(&format!("; vocabulary of {}", thousands(words as u64)));
        }
        text.push('\n');
        let width = (longest + 1 - shortest).div_ceil(LENGTH_BINS).max(1);
        let mut bins = vec![0u64; (longest - shortest) / width + 1];
        for length in &self.lengths {
            bins[(length - shortest) / width] += 1;
        }
        let most = bins.iter().copied().max().unwrap_or(0);
        for (count, start) in bins.iter().zip((shortest..).step_by(width)) {
            let range = format!("{start}-{}", (start + width - 1).min(longest));
            let shown = thousands(*count);
            text.push_str(&format!("  {range:<11} {shown:>7}  {}\n", blocks(*count, most)));
        }
        text
    }
}

fn mean(lengths: &[usize]) -> f64 {
    lengths.iter().sum::<usize>() as f64 / lengths.len().max(1) as f64
}

/// How many numbers of each text count, sorted: all up to the last that is not padding.
fn lengths(table: &Table) -> Vec<usize> {
    let Some(column) = table.column("tokens").filter(|column| column.dtype == Dtype::U16) else {
        return Vec::new();
    };
    let row = 2 * column.shape.iter().product::<usize>();
    let length = |row: &[u8]| {
        let (pairs, _) = row.as_chunks::<2>();
        pairs.iter().rposition(|pair| *pair != [0, 0]).map_or(0, |last| last + 1)
    };
    let mut lengths: Vec<usize> = column.bytes.chunks_exact(row.max(1)).map(length).collect();
    lengths.sort_unstable();
    lengths
}

fn blocks(count: u64, most: u64) -> String {
    let eighths = count as usize * BAR * 8 / (most as usize).max(1);
    let part = ["", "▏", "▎", "▍", "▌", "▋", "▊", "▉"][eighths % 8];
    let part = if count > 0 && eighths == 0 { "▏" } else { part };
    "█".repeat(eighths / 8) + part
}
