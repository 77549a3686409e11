//! `skep hive`: keeps the parameters, for workers here and elsewhere.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use clap::Args;
use skep_data::{Store, list_runs};
use skep_hive::{Access, Deadlines, Hive, HiveError, HiveSettings, Server, TlsIdentity};
use skep_learn::Task;
use tokio::net::TcpListener;
use tokio::sync::watch;

use crate::cli::runtime;
use crate::connect;
use crate::failure::Failure;
use crate::job_file::{self, JobFlags};
use crate::logging::LogFormat;
use crate::prepare::{PreparedRun, prepare};
use crate::signals;
use crate::store_lock::StoreLock;

/// How to serve.
#[derive(Args, Clone, Debug)]
pub(crate) struct HiveFlags {
    /// A task or a job file whose run to create; runs that are in the store go on by themselves
    #[arg(value_name = "JOB")]
    job: Option<String>,
    /// Where to listen
    #[arg(long, value_name = "ADDRESS", default_value = "127.0.0.1:29500")]
    listen: String,
    /// Where everything is kept: a folder or file:// address
    #[arg(long, env = "SKEP_STORE", value_name = "STORE", default_value = "skep-runs")]
    store: String,
    /// A file with the admin key, made if it is not there; the variable SKEP_KEY holds the key itself
    #[arg(long, env = "SKEP_KEY_FILE", value_name = "FILE")]
    key_file: Option<PathBuf>,
    /// Serve TLS: `auto` makes and keeps a certificate; or CERTIFICATE.pem,KEY.pem
    #[arg(long, value_name = "auto|CERT,KEY")]
    tls: Option<String>,
    /// Where `--tls auto` keeps its certificate
    #[arg(long, value_name = "DIR")]
    tls_dir: Option<PathBuf>,
    /// The host name or address that workers use, for `--tls auto` and the join line
    #[arg(long, value_name = "HOST")]
    host: Option<String>,
    /// Off loopback, serve without keys or without TLS all the same: everyone who can reach the
    /// port can read and change everything
    #[arg(long)]
    insecure: bool,
    /// Mebibytes of what others send that may be in memory at once
    #[arg(long, value_name = "MIB", default_value_t = 1024)]
    byte_budget: usize,
    #[command(flatten)]
    job_flags: JobFlags,
}

pub(crate) fn hive(
    flags: HiveFlags,
    tasks: &[Arc<dyn Task>],
    log_format: LogFormat,
) -> Result<ExitCode, Failure> {
    let stop = signals::flag()?;
    let threads = std::thread::available_parallelism().map_or(2, |cores| cores.get().clamp(2, 8));
    runtime(threads)?.block_on(async {
        let listener = listen(&flags.listen).await?;
        let address = local_address(&listener)?;
        let key = admin_key(&flags)?;
        let tls = identity(&flags, address)?;
        check_exposure(&flags, address, key.is_some(), tls.is_some())?;
        let store = Store::open(&flags.store)?;
        let lock = StoreLock::take(&store);
        if lock.is_none() {
            tracing::warn!("another hive is at work on this store; taking over");
        }
        // Everything that can be wrong with the job is found before the store is claimed.
        let taken = list_runs(&store).await?;
        let prepared = match &flags.job {
            Some(job) => prepare_job(job, &flags.job_flags, tasks, &taken)?,
            None => None,
        };
        let access = match &key {
            Some(key) => Access::with_keys(&store, key).await?,
            None => Access::open(),
        };
        let deadlines = Deadlines::default();
        let byte_budget = flags.byte_budget.max(1) << 20;
        let hive = Hive::open(HiveSettings { store, access, byte_budget, deadlines }).await?;
        if let Some(prepared) = prepared {
            submit(&hive, &prepared).await?;
        }
        for line in announcement(&flags, address, key.is_some(), tls.as_ref(), &hive) {
            match log_format {
                LogFormat::Json => tracing::info!("{line}"),
                LogFormat::Text => eprintln!("{line}"),
            }
        }
        let (down, shutdown) = watch::channel(false);
        let server = tokio::spawn(skep_hive::serve(
            Server { listener, tls, deadlines },
            skep_hive::app(hive.clone()),
            shutdown,
        ));
        let replaced = tokio::select! {
            () = signals::raised(&stop) => None,
            error = hive.replaced() => Some(error),
        };
        if replaced.is_none() {
            tracing::info!("going down: writing checkpoints");
            hive.close().await;
        }
        down.send_replace(true);
        if let Ok(ended) = server.await {
            ended?;
        }
        match replaced {
            Some(error @ HiveError::Replaced { .. }) => Err(Failure::fault(error.to_string())),
            Some(error) => Err(error.into()),
            None => Ok(ExitCode::SUCCESS),
        }
    })
}

/// Opens a socket, or says why that cannot be.
pub(crate) async fn listen(address: &str) -> Result<TcpListener, Failure> {
    TcpListener::bind(address).await.map_err(|error| {
        let failure = Failure::mistake(format!("cannot listen on {address}: {error}"));
        match error.kind() {
            std::io::ErrorKind::AddrInUse => failure.hint(
                "another program has the port; choose one with --listen, or end that program",
            ),
            _ => failure.hint("addresses look like 127.0.0.1:29500 or 0.0.0.0:29500"),
        }
    })
}

pub(crate) fn local_address(listener: &TcpListener) -> Result<SocketAddr, Failure> {
    listener.local_addr().map_err(|error| Failure::fault(error.to_string()))
}

/// The admin key: from the environment, from a file, or made and kept in that file.
fn admin_key(flags: &HiveFlags) -> Result<Option<String>, Failure> {
    if let Some(path) = &flags.key_file
        && !path.exists()
    {
        let key = super::key::new_key()?;
        super::key::write_private(path, &key)?;
        tracing::info!("made an admin key: {}", path.display());
    }
    connect::key(flags.key_file.as_deref())
}

fn identity(flags: &HiveFlags, address: SocketAddr) -> Result<Option<TlsIdentity>, Failure> {
    match flags.tls.as_deref() {
        None => Ok(None),
        Some("auto") => {
            let folder = flags.tls_dir.clone().unwrap_or_else(|| {
                let home = std::env::var_os("HOME").unwrap_or_default();
                Path::new(&home).join(".config/skep/tls")
            });
            let mut names =
                vec!["localhost".to_owned(), "127.0.0.1".to_owned(), address.ip().to_string()];
            names.extend(flags.host.clone());
            names.sort();
            names.dedup();
            Ok(Some(TlsIdentity::auto(&folder, &names)?))
        }
        Some(files) => {
            let (certificate, key) = files.split_once(',').ok_or_else(|| {
                Failure::mistake(format!("--tls `{files}` is neither auto nor CERT.pem,KEY.pem"))
            })?;
            Ok(Some(TlsIdentity::load(Path::new(certificate), Path::new(key))?))
        }
    }
}

/// Off loopback a hive needs keys and TLS, or an explicit flag that says otherwise.
fn check_exposure(
    flags: &HiveFlags,
    address: SocketAddr,
    keys: bool,
    tls: bool,
) -> Result<(), Failure> {
    if address.ip().is_loopback() || flags.insecure || (keys && tls) {
        return Ok(());
    }
    let missing = match (keys, tls) {
        (false, false) => "keys and TLS",
        (false, true) => "keys",
        _ => "TLS",
    };
    Err(Failure::mistake(format!("{address} is not loopback, and the hive has no {missing}")).hint(
        "add --key-file admin.key --tls auto (both are made if they are not there), or --insecure \
         if the network is yours alone",
    ))
}

/// Where the hive is, and how to join it.
fn announcement(
    flags: &HiveFlags,
    address: SocketAddr,
    keys: bool,
    tls: Option<&TlsIdentity>,
    hive: &Hive,
) -> Vec<String> {
    let scheme = if tls.is_some() { "https" } else { "http" };
    let host = flags.host.clone().unwrap_or_else(|| match address.ip() {
        ip if ip.is_unspecified() => "HOST".to_owned(),
        std::net::IpAddr::V6(ip) => format!("[{ip}]"),
        ip => ip.to_string(),
    });
    let url = format!("{scheme}://{host}:{}", address.port());
    let mut lines = vec![format!(
        "hive at {url}, generation {}, store {}",
        hive.generation(),
        hive.store().url()
    )];
    let pin = tls.map_or(String::new(), |tls| format!(" --pin {}", tls.fingerprint()));
    let runs = hive.run_names();
    let run = match runs.as_slice() {
        [only] => format!(" --run {only}"),
        _ => String::new(),
    };
    if keys {
        lines.push(format!(
            "make a worker's key with: skep key create --hive {url}{pin} --role worker{run} \
             --out worker.key"
        ));
    }
    let key = if keys { " --key-file worker.key" } else { "" };
    lines.push(format!("join with: skep worker --hive {url}{pin}{run}{key}"));
    lines
}

/// The run that a job asks for, unless the store has it: then that one goes on.
fn prepare_job(
    job: &str,
    flags: &JobFlags,
    tasks: &[Arc<dyn Task>],
    taken: &[String],
) -> Result<Option<PreparedRun>, Failure> {
    let task_job = job_file::read(job, flags, tasks)?;
    let name = task_job.job.run.name.clone().unwrap_or_else(|| task_job.usual_name.clone());
    if taken.contains(&name) {
        // Starting the same command again goes on with what it started.
        tracing::info!(run = name, "is in the store and goes on; --name makes another");
        return Ok(None);
    }
    prepare(&task_job, name).map(Some)
}

/// Puts the data into the store and creates the run.
pub(crate) async fn submit(hive: &Hive, prepared: &PreparedRun) -> Result<(), Failure> {
    for (shard, bytes) in &prepared.data.shards {
        hive.put_shard(&shard.hash, bytes.clone()).await?;
    }
    hive.create(prepared.spec.clone(), prepared.version0.as_bytes()).await?;
    Ok(())
}
