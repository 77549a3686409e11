//! Takes each new version of a hive's run live.

use std::sync::Arc;
use std::time::Duration;

use skep_worker::{Client, ClientError};
use tokio::sync::watch;

use crate::{Loaded, Serving};

/// How long one question to the hive may wait for a version.
const WAIT: Duration = Duration::from_secs(30);

/// Pulls versions as they come out and publishes each, until `shutdown` is true. A hive that is
/// away costs nothing but news: the last version goes on answering.
pub async fn follow(
    serving: Arc<Serving>,
    client: Client,
    run: String,
    mut shutdown: watch::Receiver<bool>,
) {
    let Ok(layout) = serving.model().layout().cloned() else { return };
    let mut known = None;
    let mut away = false;
    loop {
        let pulled = tokio::select! {
            pulled = client.newer_parameters(&run, known, WAIT) => pulled,
            _ = shutdown.wait_for(|down| *down) => return,
        };
        let trouble = match pulled {
            Ok(None) => None,
            Ok(Some(pulled)) => {
                let version = pulled.version;
                match pulled.frame(&layout) {
                    Ok(parameters) => {
                        tracing::debug!(%version, "live");
                        serving.publish(Loaded { version: version.to_string(), parameters });
                        known = Some(version);
                        None
                    }
                    Err(error) => Some(error),
                }
            }
            Err(ClientError::Stopped) => return,
            Err(error) => Some(error),
        };
        if let Some(error) = &trouble {
            if !away {
                tracing::warn!("{error}; the last version goes on answering");
            }
            tokio::select! {
                () = tokio::time::sleep(Duration::from_secs(1)) => {}
                _ = shutdown.wait_for(|down| *down) => return,
            }
        } else if away {
            tracing::info!("the hive answers again");
        }
        away = trouble.is_some();
    }
}
