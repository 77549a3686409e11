//! How a command reaches a hive: address, key, certificate.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use clap::Args;
use skep_worker::{Client, ClientSettings};

use crate::failure::Failure;

/// Where the hive is.
#[derive(Args, Clone, Debug)]
pub(crate) struct ConnectFlags {
    /// The hive's address
    #[arg(
        long,
        global = true,
        env = "SKEP_HIVE",
        value_name = "URL",
        default_value = "http://127.0.0.1:29500"
    )]
    pub(crate) hive: String,
    /// A file with the key; the variable SKEP_KEY holds the key itself
    #[arg(long, global = true, env = "SKEP_KEY_FILE", value_name = "FILE")]
    pub(crate) key_file: Option<PathBuf>,
    /// The hash of the hive's certificate, to trust that one alone (`skep hive --tls auto` prints it)
    #[arg(long, global = true, env = "SKEP_PIN", value_name = "SHA256")]
    pub(crate) pin: Option<String>,
    /// A file of certificate authorities to trust instead of the public ones
    #[arg(long, global = true, env = "SKEP_CA", value_name = "FILE")]
    pub(crate) ca: Option<PathBuf>,
}

impl ConnectFlags {
    pub(crate) fn settings(
        &self,
        patience: Duration,
        stop: Arc<AtomicBool>,
    ) -> Result<ClientSettings, Failure> {
        Ok(ClientSettings {
            url: self.hive.clone(),
            key: key(self.key_file.as_deref())?,
            pin: self.pin.clone(),
            authority: self.ca.clone(),
            patience,
            stop,
        })
    }

    /// A run's name, with the hive that is named before it, as in http://HOST:PORT/RUN, or else this
    /// one.
    pub(crate) fn of_run<'text>(&self, text: &'text str) -> (Self, &'text str) {
        let mut connect = self.clone();
        match text.trim_end_matches('/').rsplit_once('/') {
            Some((hive, run)) if text.contains("://") && !hive.ends_with('/') => {
                hive.clone_into(&mut connect.hive);
                (connect, run)
            }
            _ => (connect, text),
        }
    }

    /// A client for a command that a person waits for.
    pub(crate) fn client(&self) -> Result<Client, Failure> {
        let settings = self.settings(Duration::from_secs(3), Arc::default())?;
        Ok(Client::new(settings)?)
    }
}

/// The key from a file or from the environment, never from the command line, which others can see.
pub(crate) fn key(file: Option<&Path>) -> Result<Option<String>, Failure> {
    if let Some(path) = file {
        let text = std::fs::read_to_string(path)
            .map_err(|error| Failure::mistake(format!("{}: {error}", path.display())))?;
        return Ok(Some(text.trim().to_owned()));
    }
    Ok(std::env::var("SKEP_KEY").ok().filter(|key| !key.trim().is_empty()))
}
