//! The accept loop: connections in, requests to the router, stalled clients out.

use std::future::Future;
use std::io;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio::time::{Instant, Sleep};
use tokio_rustls::TlsAcceptor;

use crate::{Deadlines, HiveError, TlsIdentity};

/// How many connections may be open at once.
const MOST_CONNECTIONS: usize = 8192;

/// How a hive listens.
pub struct Server {
    /// The socket.
    pub listener: TcpListener,
    /// The certificate, with TLS.
    pub tls: Option<TlsIdentity>,
    /// How long to wait for clients.
    pub deadlines: Deadlines,
}

/// Serves until `shutdown` is true, then drains.
pub async fn serve(
    server: Server,
    app: Router,
    mut shutdown: watch::Receiver<bool>,
) -> Result<(), HiveError> {
    let deadlines = server.deadlines;
    let acceptor = server.tls.map(TlsIdentity::config).transpose()?.map(TlsAcceptor::from);
    let places = Arc::new(Semaphore::new(MOST_CONNECTIONS));
    loop {
        let accepted = tokio::select! {
            accepted = server.listener.accept() => accepted,
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
        let (app, acceptor, shutdown) = (app.clone(), acceptor.clone(), shutdown.clone());
        tokio::spawn(async move {
            let _place = place;
            let _ = stream.set_nodelay(true);
            let stream = Timed::new(stream, deadlines.write);
            match acceptor {
                None => connection(stream, deadlines, app, shutdown).await,
                Some(acceptor) => {
                    let handshake = acceptor.accept(stream);
                    match tokio::time::timeout(deadlines.head, handshake).await {
                        Ok(Ok(stream)) => connection(stream, deadlines, app, shutdown).await,
                        Ok(Err(error)) => tracing::debug!("handshake: {error}"),
                        Err(_) => tracing::debug!("handshake: too slow"),
                    }
                }
            }
        });
    }
    drop(server.listener);
    let all = u32::try_from(MOST_CONNECTIONS).unwrap_or(u32::MAX);
    let drained = tokio::time::timeout(deadlines.drain, places.acquire_many(all)).await;
    if drained.is_err() {
        tracing::info!("some connections did not end in time");
    }
    Ok(())
}

/// Resolves when the hive goes down, or whoever could say so is gone.
async fn going_down(shutdown: &mut watch::Receiver<bool>) {
    let _ = shutdown.wait_for(|down| *down).await.is_ok();
}

async fn connection<S>(
    stream: S,
    deadlines: Deadlines,
    app: Router,
    mut shutdown: watch::Receiver<bool>,
) where
    S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(deadlines.head)
        .max_buf_size(1 << 20)
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

/// A stream that fails when written bytes are not taken in time: what is not taken keeps an old
/// version in memory.
struct Timed {
    stream: TcpStream,
    patience: Duration,
    deadline: Option<Pin<Box<Sleep>>>,
}

impl Timed {
    fn new(stream: TcpStream, patience: Duration) -> Self {
        Self { stream, patience, deadline: None }
    }

    fn watch<T>(
        &mut self,
        context: &mut Context<'_>,
        poll: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if poll.is_ready() {
            self.deadline = None;
            return poll;
        }
        let until = Instant::now() + self.patience;
        let deadline =
            self.deadline.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(until)));
        if deadline.as_mut().poll(context).is_ready() {
            self.deadline = None;
            return Poll::Ready(Err(io::Error::new(
                io::ErrorKind::TimedOut,
                "the client does not take what it asked for",
            )));
        }
        Poll::Pending
    }
}

impl AsyncRead for Timed {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl AsyncWrite for Timed {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let poll = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.watch(context, poll)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let poll = Pin::new(&mut self.stream).poll_write_vectored(context, slices);
        self.watch(context, poll)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let poll = Pin::new(&mut self.stream).poll_flush(context);
        self.watch(context, poll)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}
