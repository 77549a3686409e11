//! The accept loop: connections in, requests to the router.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};

use crate::ServeError;

/// How many connections may be open at once.
const MOST_CONNECTIONS: usize = 4096;

/// For the head of a request; also how long an idle connection is kept.
const HEAD_DEADLINE: Duration = Duration::from_secs(60);

/// For open requests, once the server goes down.
const DRAIN_DEADLINE: Duration = Duration::from_secs(5);

/// Serves until `shutdown` is true, then drains.
pub async fn run(
    listener: TcpListener,
    app: Router,
    mut shutdown: watch::Receiver<bool>,
) -> Result<(), ServeError> {
    let places = Arc::new(Semaphore::new(MOST_CONNECTIONS));
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = going_down(&mut shutdown) => break,
        };
        let stream = match accepted {
            Ok((stream, _)) => stream,
            Err(error) => {
                // Out of descriptors, most likely: others will close.
                tracing::warn!("accept: {error}");
                tokio::time::sleep(Duration::from_millis(50)).await;
                continue;
            }
        };
        let Ok(place) = places.clone().try_acquire_owned() else { continue };
        let (app, shutdown) = (app.clone(), shutdown.clone());
        tokio::spawn(async move {
            let _place = place;
            connection(stream, app, shutdown).await;
        });
    }
    drop(listener);
    let all = u32::try_from(MOST_CONNECTIONS).unwrap_or(u32::MAX);
    if tokio::time::timeout(DRAIN_DEADLINE, places.acquire_many(all)).await.is_err() {
        tracing::info!("some connections did not end in time");
    }
    Ok(())
}

/// Resolves when the server goes down, or whoever could say so is gone.
async fn going_down(shutdown: &mut watch::Receiver<bool>) {
    let _ = shutdown.wait_for(|down| *down).await.is_ok();
}

async fn connection(stream: TcpStream, app: Router, mut shutdown: watch::Receiver<bool>) {
    let _ = stream.set_nodelay(true);
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEAD_DEADLINE)
        .max_buf_size(64 << 10)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(app));
    let mut connection = pin!(connection);
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        () = going_down(&mut shutdown) => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = ended {
        tracing::debug!("connection: {error}");
    }
}
