//! `skep key`: makes keys, issues them at a hive, and takes them back.

use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Args, Subcommand, ValueEnum};
use skep_wire::{KeyRequest, KeyRole};

use crate::cli::runtime;
use crate::connect::ConnectFlags;
use crate::failure::Failure;

/// What to do with keys.
#[derive(Args, Clone, Debug)]
pub(crate) struct KeyFlags {
    #[command(subcommand)]
    action: Action,
}

#[derive(Subcommand, Clone, Debug)]
enum Action {
    /// Print a new random key, for a hive's SKEP_KEY or --key-file
    New,
    /// Issue a key at a hive; needs an admin key. It is shown this once
    Create {
        #[command(flatten)]
        connect: ConnectFlags,
        /// What it allows
        #[arg(long, value_enum, default_value = "worker")]
        role: Role,
        /// The run it is for; all runs where it is left out
        #[arg(long)]
        run: Option<String>,
        /// When it expires: 90s, 30m, 12h, 2d; never where it is left out
        #[arg(long, value_name = "TIME")]
        expires: Option<String>,
        /// Write the key to a file that only you can read, instead of to stdout
        #[arg(long, value_name = "FILE")]
        out: Option<PathBuf>,
    },
    /// Take a key back, by its id
    Revoke {
        #[command(flatten)]
        connect: ConnectFlags,
        /// The key's id: the middle part of `skep_ID_…`
        id: String,
    },
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Role {
    Reader,
    Worker,
    Admin,
}

pub(crate) fn key(flags: KeyFlags) -> Result<ExitCode, Failure> {
    match flags.action {
        Action::New => println!("{}", new_key()?),
        Action::Create { connect, role, run, expires, out } => {
            let role = match role {
                Role::Reader => KeyRole::Reader,
                Role::Worker => KeyRole::Worker,
                Role::Admin => KeyRole::Admin,
            };
            let seconds = expires.as_deref().map(seconds).transpose()?;
            let client = connect.client()?;
            let request = KeyRequest { role, run, seconds };
            let issued = runtime(1)?.block_on(client.create_key(&request))?;
            match out {
                Some(path) => {
                    write_private(&path, &issued.key)?;
                    println!("{}", issued.id);
                }
                None => println!("{}", issued.key),
            }
        }
        Action::Revoke { connect, id } => {
            let client = connect.client()?;
            runtime(1)?.block_on(client.revoke_key(&id))?;
            println!("{id}: revoked");
        }
    }
    Ok(ExitCode::SUCCESS)
}

/// 256 random bits.
pub(crate) fn new_key() -> Result<String, Failure> {
    let mut bytes = [0; 32];
    getrandom::fill(&mut bytes).map_err(|error| Failure::fault(format!("randomness: {error}")))?;
    let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
    Ok(format!("skep_admin_{hex}"))
}

/// Writes a key to a file that only its owner can read.
pub(crate) fn write_private(path: &Path, key: &str) -> Result<(), Failure> {
    let explain = |error: std::io::Error| Failure::mistake(format!("{}: {error}", path.display()));
    let mut file = std::fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600)
        .open(path)
        .map_err(explain)?;
    writeln!(file, "{key}").map_err(explain)
}

fn seconds(text: &str) -> Result<f64, Failure> {
    let wrong = || Failure::mistake(format!("--expires `{text}` is not a time such as 30m or 2d"));
    let unit = text.chars().last().ok_or_else(wrong)?;
    let factor = match unit {
        's' => 1.0,
        'm' => 60.0,
        'h' => 3600.0,
        'd' => 86_400.0,
        _ => return Err(wrong()),
    };
    let number: f64 = text[..text.len() - 1].parse().map_err(|_| wrong())?;
    if number > 0.0 { Ok(number * factor) } else { Err(wrong()) }
}
