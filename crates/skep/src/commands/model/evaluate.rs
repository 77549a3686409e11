//! `skep model evaluate`: how well models do on test data, one by one and together.

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;

use clap::{Args, ValueEnum};
use serde_json::{Value, json};
use skep_data::{Table, Vocabulary};
use skep_learn::{Assets, Ensemble, Task, Vote, classify, ensemble};
use skep_wire::EvaluationCounts;

use crate::cli::runtime;
use crate::failure::Failure;
use crate::progress::{bar, reading, thousands};
use skep_serve::found::{self, Member};

/// How many rows go through the models at once.
const BATCH: u64 = 250;

/// Which models, on which data.
#[derive(Args, Clone, Debug)]
pub(crate) struct EvaluateFlags {
    /// Model files, or STORE/RUN, with @best, @final or @VERSION behind it; or the file of an ensemble
    #[arg(value_name = "MODEL", required = true)]
    models: Vec<String>,
    /// Test data: a folder, a file or a built-in name; what the first model was trained on where it
    /// is left out
    #[arg(long, value_name = "DATA")]
    data: Option<String>,
    /// What kind of model the files are, where nothing beside or in them says so
    #[arg(long = "model", visible_alias = "task", value_name = "KIND")]
    kind: Option<String>,
    /// The vocabulary.json of a model of texts, where it is not with the model
    #[arg(long, value_name = "FILE")]
    vocabulary: Option<PathBuf>,
    /// How several models come to one answer
    #[arg(long, value_enum, default_value_t)]
    vote: VoteFlag,
    /// As JSON
    #[arg(long)]
    json: bool,
}

/// How several models come to one answer.
#[derive(Clone, Copy, Debug, Default, ValueEnum)]
enum VoteFlag {
    /// The mean of their probabilities
    #[default]
    Mean,
    /// What most of them answer
    Majority,
}

impl From<VoteFlag> for Vote {
    fn from(flag: VoteFlag) -> Self {
        match flag {
            VoteFlag::Mean => Self::Mean,
            VoteFlag::Majority => Self::Majority,
        }
    }
}

pub(crate) fn evaluate(
    flags: &EvaluateFlags,
    tasks: &[Arc<dyn Task>],
) -> Result<ExitCode, Failure> {
    runtime(1)?.block_on(run(flags, tasks))
}

/// Measures models together on the data they were trained for, and says how they do.
pub(crate) async fn measure(
    models: &[String],
    tasks: &[Arc<dyn Task>],
    json: bool,
) -> Result<ExitCode, Failure> {
    let vote = VoteFlag::default();
    let models = models.to_vec();
    let flags = EvaluateFlags { models, data: None, kind: None, vocabulary: None, vote, json };
    run(&flags, tasks).await
}

async fn run(flags: &EvaluateFlags, tasks: &[Arc<dyn Task>]) -> Result<ExitCode, Failure> {
    let vote = Vote::from(flags.vote);
    let members = open(flags, tasks).await?;
    let Some(first) = members.first() else { return Err(Failure::mistake("give a model")) };
    Member::check(&members)?;
    let mut job = first.job.clone();
    if let Some(data) = &flags.data {
        data.clone_into(&mut job.data.source);
    }
    let read = || first.task.test_rows(&job, &first.found.assets);
    let rows = reading(&job.data.source, read)?;
    let mut computes = Vec::new();
    for member in &members {
        computes.push(member.found.load(&*member.task, &member.job)?.0);
    }
    let tally = tally(Ensemble::new(computes, vote)?, &rows, vote)?;
    let names: Vec<&str> = members.iter().map(|member| member.found.name.as_str()).collect();
    let classes = classes(first, tally.confusion.len());
    if flags.json {
        println!("{}", tally.json(&names, &classes, &job.data.source, vote));
    } else {
        tally.print(&names, &classes, &job.data.source, vote);
    }
    Ok(ExitCode::SUCCESS)
}

async fn open(flags: &EvaluateFlags, tasks: &[Arc<dyn Task>]) -> Result<Vec<Member>, Failure> {
    let mut given = Assets::new();
    if let Some(path) = &flags.vocabulary {
        let explain =
            |error: std::io::Error| Failure::mistake(format!("{}: {error}", path.display()));
        given.insert(Vocabulary::ASSET.to_owned(), std::fs::read(path).map_err(explain)?);
    }
    let mut members = Vec::new();
    for name in found::members(&flags.models)? {
        members.push(Member::open(&name, flags.kind.as_deref(), tasks, &given).await?);
    }
    Ok(members)
}

/// What the classes are called.
fn classes(member: &Member, count: usize) -> Vec<String> {
    let inference = member.task.inference(&member.job);
    let named = inference.map(|inference| inference.classes);
    named
        .filter(|names| names.len() == count)
        .unwrap_or_else(|| (0..count).map(|class| class.to_string()).collect())
}

/// What came of it.
struct Tally {
    rows: u64,
    members: Vec<EvaluationCounts>,
    all: EvaluationCounts,
    /// Of all together, how often a class (the row) was answered with another (the column).
    confusion: Vec<Vec<u64>>,
}

fn tally(mut members: Ensemble, rows: &Table, vote: Vote) -> Result<Tally, Failure> {
    let none = EvaluationCounts { loss_sum: 0.0, correct: Some(0) };
    let mut tally = Tally {
        rows: rows.rows() as u64,
        members: vec![none; members.len()],
        all: none,
        confusion: Vec::new(),
    };
    let add = |sum: &mut EvaluationCounts, counts: EvaluationCounts| {
        sum.loss_sum += counts.loss_sum;
        sum.correct = sum.correct.zip(counts.correct).map(|(sum, more)| sum + more);
    };
    let progress = bar(tally.rows, "measuring {wide_bar:.yellow/238} {pos}/{len} samples");
    let mut start = 0;
    while start < tally.rows {
        let end = (start + BATCH).min(tally.rows);
        let batch = rows.slice(start as usize..end as usize)?;
        let labels = classify::label_numbers(classify::column(&batch, "label")?)?;
        let scores = members.infer_each(&batch)?;
        let classes = scores[0].len() / batch.rows().max(1);
        tally.confusion.resize(classes, vec![0; classes]);
        for (sum, scores) in tally.members.iter_mut().zip(&scores) {
            add(sum, classify::count(scores, &labels));
        }
        let together = match &scores[..] {
            [alone] => alone.clone(),
            scores => ensemble::combine(scores, classes, vote),
        };
        add(&mut tally.all, classify::count(&together, &labels));
        for (row, label) in together.chunks_exact(classes.max(1)).zip(&labels) {
            let truth = usize::try_from(*label).ok().and_then(|at| tally.confusion.get_mut(at));
            let truth = truth.ok_or_else(|| {
                Failure::mistake(format!(
                    "the data has class {label}, of {classes} the model knows"
                ))
            })?;
            truth[classify::best(row)] += 1;
        }
        progress.inc(end - start);
        start = end;
    }
    progress.finish_and_clear();
    Ok(tally)
}

impl Tally {
    fn accuracy(&self, counts: &EvaluationCounts) -> f64 {
        counts.correct.unwrap_or_default() as f64 / self.rows.max(1) as f64
    }

    fn loss(&self, counts: &EvaluationCounts) -> f64 {
        counts.loss_sum / self.rows.max(1) as f64
    }

    fn json(&self, names: &[&str], classes: &[String], data: &str, vote: Vote) -> Value {
        let figures = |counts: &EvaluationCounts| (self.accuracy(counts), self.loss(counts));
        let member = |(name, counts): (&&str, &EvaluationCounts)| {
            let (accuracy, loss) = figures(counts);
            json!({ "model": name, "accuracy": accuracy, "loss": loss })
        };
        let (accuracy, loss) = figures(&self.all);
        json!({
            "data": data,
            "samples": self.rows,
            "models": names.iter().zip(&self.members).map(member).collect::<Vec<_>>(),
            "vote": if vote == Vote::Mean { "mean" } else { "majority" },
            "accuracy": accuracy,
            "loss": loss,
            "classes": classes,
            "confusion": self.confusion,
        })
    }

    fn print(&self, names: &[&str], classes: &[String], data: &str, vote: Vote) {
        println!("{} samples of {data}", thousands(self.rows));
        let together = match vote {
            Vote::Mean => "together, by mean",
            Vote::Majority => "together, by majority",
        };
        let lines = names.iter().copied().zip(&self.members);
        let lines: Vec<_> = match names.len() {
            1 => lines.collect(),
            _ => lines.chain([(together, &self.all)]).collect(),
        };
        let width = lines.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
        for (name, counts) in lines {
            let (accuracy, loss) = (100.0 * self.accuracy(counts), self.loss(counts));
            println!("{name:<width$}  accuracy {accuracy:>6.2} %  loss {loss:.4}");
        }
        let width = classes.iter().map(String::len).max().unwrap_or(0).max(6);
        println!("\nrow: what it is; column: what was answered; last: share answered rightly");
        print!("{:<width$}", "");
        for class in classes {
            print!("  {class:>width$}");
        }
        println!();
        for (at, (class, row)) in classes.iter().zip(&self.confusion).enumerate() {
            print!("{class:<width$}");
            for count in row {
                print!("  {:>width$}", thousands(*count));
            }
            let of = row.iter().sum::<u64>();
            let share = 100.0 * row[at] as f64 / of.max(1) as f64;
            println!("  {share:>6.2} %");
        }
    }
}
