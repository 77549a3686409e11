//! Logs for people or for programs, on stderr: stdout is for data.

use std::io::IsTerminal;

use clap::{Args, ValueEnum};
use tracing_subscriber::EnvFilter;

/// How to log.
#[derive(Args, Clone, Debug)]
pub(crate) struct LogFlags {
    /// What to log: error, warn, info, debug, or a filter such as `info,skep_hive=debug`
    #[arg(long, global = true, env = "SKEP_LOG", value_name = "LEVEL")]
    pub(crate) log: Option<String>,
    /// How to log
    #[arg(long, global = true, value_enum, default_value = "text", value_name = "FORM")]
    pub(crate) log_format: LogFormat,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum LogFormat {
    Text,
    Json,
}

/// Sets logging up; `usual` is the level of the command unless told otherwise.
pub(crate) fn start(flags: &LogFlags, usual: &str) -> Result<(), crate::failure::Failure> {
    let filter = flags.log.as_deref().unwrap_or(usual);
    let filter = EnvFilter::try_new(filter).map_err(|error| {
        crate::failure::Failure::mistake(format!("--log `{filter}`: {error}"))
            .hint("levels are error, warn, info, debug and trace")
    })?;
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    match flags.log_format {
        LogFormat::Json => builder.json().flatten_event(true).init(),
        LogFormat::Text => {
            builder.with_target(false).with_ansi(std::io::stderr().is_terminal()).init();
        }
    }
    Ok(())
}
