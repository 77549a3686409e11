//! `skep logs`: what a run's workers said.

use std::process::ExitCode;
use std::time::Duration;

use clap::Args;

use crate::cli::runtime;
use crate::connect::ConnectFlags;
use crate::failure::Failure;

/// Whose logs.
#[derive(Args, Clone, Debug)]
pub(crate) struct LogsFlags {
    #[command(flatten)]
    connect: ConnectFlags,
    /// The run
    run: String,
    /// Go on with lines as they come
    #[arg(long, short)]
    follow: bool,
}

pub(crate) fn logs(flags: &LogsFlags) -> Result<ExitCode, Failure> {
    let client = flags.connect.client()?;
    runtime(1)?.block_on(async {
        // The newest line's time, and how many lines of that time were shown: lines come in order,
        // and several may share a time.
        let (mut newest, mut shown) = (0, 0);
        loop {
            let lines = client.logs(&flags.run).await?;
            let old = lines.iter().take_while(|line| line.time < newest).count();
            let same = lines[old..].iter().take_while(|line| line.time == newest).count();
            for line in &lines[old + same.min(shown)..] {
                shown = if line.time == newest { shown + 1 } else { 1 };
                newest = line.time;
                println!(
                    "{}  {:<5}  {}  {}",
                    clock(line.time),
                    line.level,
                    line.worker,
                    line.message
                );
            }
            if !flags.follow {
                return Ok(ExitCode::SUCCESS);
            }
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
    })
}

/// Milliseconds since 1970 as a time of day, in UTC.
pub(crate) fn clock(millis: u64) -> String {
    let seconds = millis / 1000 % 86_400;
    format!("{:02}:{:02}:{:02}Z", seconds / 3600, seconds % 3600 / 60, seconds % 60)
}
