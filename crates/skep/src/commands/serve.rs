//! `skep serve`: answers questions with a trained model, or with one that is being trained.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::{Args, ValueEnum};
use skep_learn::{ImageForm, Task};
use skep_serve::{FetchSettings, Fetcher, GraphSettings, Model, Serving, ServingSettings};
use skep_worker::Client;
use tokio::sync::watch;

use crate::cli::runtime;
use crate::commands::hive::{listen, local_address};
use crate::connect::ConnectFlags;
use crate::failure::Failure;
use crate::signals;

/// What to serve, and how.
#[derive(Args, Clone, Debug)]
pub(crate) struct ServeFlags {
    /// A model file, an ONNX file, STORE/RUN or STORE/RUN@best; several answer together, by the mean
    /// of what they hold likely
    #[arg(value_name = "MODEL", required_unless_present = "follow")]
    models: Vec<String>,
    /// A run of a hive, each version of which goes live as it comes out: http://HOST:PORT/RUN, or a
    /// run's name with --hive
    #[arg(long, value_name = "HIVE/RUN", conflicts_with = "models")]
    follow: Option<String>,
    /// What kind of model the file is, where nothing beside it says so
    #[arg(long = "model", value_name = "KIND", conflicts_with = "follow")]
    kind: Option<String>,
    /// Where to listen
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:8080")]
    listen: String,
    /// Off loopback, answer everyone who can reach the port: there are neither keys nor TLS here
    #[arg(long)]
    open: bool,
    /// Threads that compute; one per core where it is left out
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
    /// Questions that may wait for a thread; further ones are answered with 503
    #[arg(long, value_name = "N", default_value_t = 256)]
    queue: usize,
    /// Fetch pictures from loopback and private addresses too
    #[arg(long)]
    allow_private_urls: bool,
    #[command(flatten)]
    connect: ConnectFlags,
    #[command(flatten)]
    graph: GraphFlags,
}

/// What an ONNX file does not say of itself.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "For ONNX files that take one picture and score classes")]
struct GraphFlags {
    /// A file with the names of the classes, one per line; the metadata `skep.classes`, or numbers,
    /// where it is left out
    #[arg(long, value_name = "FILE", conflicts_with = "follow")]
    classes: Option<PathBuf>,
    /// What a byte of a picture is divided by first: 255 for models that take 0 to 1, 1 for those
    /// that take bytes [default: 255, or 1 if the file has metadata of Skep's]
    #[arg(long, value_name = "NUMBER", conflicts_with = "follow")]
    scale: Option<f32>,
    /// What is taken from a value then: one number, or one per channel with commas [default: 0]
    #[arg(
        long,
        value_name = "NUMBERS",
        value_delimiter = ',',
        allow_negative_numbers = true,
        conflicts_with = "follow"
    )]
    mean: Option<Vec<f32>>,
    /// What it is divided by then, likewise [default: 1]
    #[arg(
        long,
        value_name = "NUMBERS",
        value_delimiter = ',',
        allow_negative_numbers = true,
        conflicts_with = "follow"
    )]
    std: Option<Vec<f32>>,
    /// How pictures are brought to the model's size: `ink` finds one figure and centres it as
    /// MNIST's are, `photograph` takes the whole [default: ink for 1 x 28 x 28, else photograph]
    #[arg(long, value_name = "FORM", conflicts_with = "follow")]
    form: Option<Form>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Form {
    Ink,
    Photograph,
}

impl GraphFlags {
    fn settings(&self) -> Result<GraphSettings, Failure> {
        let classes = match &self.classes {
            None => None,
            Some(path) => {
                let text = std::fs::read_to_string(path).map_err(|error| {
                    Failure::mistake(format!("--classes {}: {error}", path.display()))
                        .hint("give a text file with one name per line")
                })?;
                let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
                Some(lines.map(str::to_owned).collect())
            }
        };
        Ok(GraphSettings {
            classes,
            mean: self.mean.clone(),
            deviation: self.std.clone(),
            scale: self.scale,
            form: self.form.map(|form| match form {
                Form::Ink => ImageForm::Ink,
                Form::Photograph => ImageForm::Photograph,
            }),
        })
    }
}

pub(crate) fn serve(flags: ServeFlags, tasks: &[Arc<dyn Task>]) -> Result<ExitCode, Failure> {
    let stop = signals::flag()?;
    let threads = std::thread::available_parallelism().map_or(2, |cores| cores.get().clamp(2, 8));
    runtime(threads)?.block_on(async {
        let fetcher = Fetcher::new(FetchSettings {
            allow_private: flags.allow_private_urls,
            ..FetchSettings::default()
        })?;
        let usual = ServingSettings::default();
        let settings = ServingSettings {
            threads: flags.threads.unwrap_or(usual.threads),
            queue: flags.queue,
            ..usual
        };
        let (down, shutdown) = watch::channel(false);
        let (serving, followed) = match &flags.follow {
            Some(follow) => {
                let (client, run) = hive_and_run(follow, &flags.connect, stop.clone())?;
                let model = followed_model(&client, &run, tasks).await?;
                (Serving::start(model, fetcher, settings)?, Some((client, run)))
            }
            None => {
                let (kind, graph) = (flags.kind.as_deref(), flags.graph.settings()?);
                let source = skep_serve::open(&flags.models, kind, tasks, &graph).await?;
                let serving = Serving::start(source.model, fetcher, settings)?;
                serving.publish(source.loaded);
                (serving, None)
            }
        };
        let listener = listen(&flags.listen).await?;
        let address = local_address(&listener)?;
        check_exposure(&flags, address)?;
        announce(&serving, address, followed.as_ref());
        let app = skep_serve::app(serving.clone());
        let server = tokio::spawn(skep_serve::run(listener, app, shutdown.clone()));
        let follower = followed
            .map(|(client, run)| tokio::spawn(skep_serve::follow(serving, client, run, shutdown)));
        signals::raised(&stop).await;
        down.send_replace(true);
        if let Some(follower) = follower {
            let _ = follower.await;
        }
        if let Ok(ended) = server.await {
            ended?;
        }
        Ok(ExitCode::SUCCESS)
    })
}

/// A client of the hive, and the run, that `--follow` names.
fn hive_and_run(
    follow: &str,
    connect: &ConnectFlags,
    stop: Arc<std::sync::atomic::AtomicBool>,
) -> Result<(Client, String), Failure> {
    let (connect, run) = connect.of_run(follow);
    if !skep_wire::RunSpec::is_name(run) {
        return Err(Failure::mistake(format!("--follow `{follow}` names no run"))
            .hint("such as http://127.0.0.1:29500/mnist"));
    }
    let client = Client::new(connect.settings(Duration::from_secs(10), stop)?)?;
    Ok((client, run.to_owned()))
}

async fn followed_model(
    client: &Client,
    run: &str,
    tasks: &[Arc<dyn Task>],
) -> Result<Model, Failure> {
    let view = client.run(run).await?;
    let task = skep_serve::task_of(tasks, &view.job.model.kind)?;
    let assets = skep_serve::assets_of_run(client, run, &view.manifest).await?;
    let model = Model::new(run, task, view.job, &assets)?;
    if model.schema()? != view.schema {
        return Err(Failure::mistake(format!(
            "run `{run}` has other tensors than this program's `{}`",
            model.kind()
        ))
        .hint("use the version of Skep that made it"));
    }
    Ok(model)
}

/// Who answers questions gives nothing away but answers; still, that it is for everyone is said
/// and not assumed.
fn check_exposure(flags: &ServeFlags, address: SocketAddr) -> Result<(), Failure> {
    if address.ip().is_loopback() || flags.open {
        return Ok(());
    }
    Err(Failure::mistake(format!("{address} is not loopback")).hint(
        "add --open to answer everyone who can reach the port, or put a proxy with TLS and keys in \
         front of a loopback address",
    ))
}

fn announce(serving: &Serving, address: SocketAddr, followed: Option<&(Client, String)>) {
    let model = serving.model();
    let what = match (followed, serving.loaded()) {
        (Some((client, run)), _) => format!("every version of {}/{run}", client.url()),
        (None, Some(loaded)) => format!("version {}", loaded.version),
        (None, None) => String::new(),
    };
    eprintln!("serving {} ({}), {what}", model.name, model.kind());
    let example = match model.takes() {
        "image" => format!("curl -F image=@FILE http://{address}/predict"),
        "text" => format!("curl --form-string text='…' http://{address}/predict"),
        _ => format!("curl http://{address}/v2/models/{}", model.name),
    };
    eprintln!("open http://{address} in a browser, or ask: {example}");
}
