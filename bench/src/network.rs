//! Push and pull of 64 MiB of parameters, against plain TCP moving the same bytes over loopback.

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use skep_wire::{
    ContributionKind, Encoding, Envelope, Frame, Layout, LeaseAnswer, LeaseRequest, Role, Schema,
    TensorSpec,
};

use crate::Failure;
use crate::process::TestHive;
use crate::rows::{Row, Target, median};

const ELEMENTS: usize = 16 << 20;
const BYTES: usize = ELEMENTS * 4;
const ROUNDS: usize = 9;

pub(crate) fn measure() -> Result<Vec<Row>, Failure> {
    let schema = Schema::new(vec![TensorSpec {
        name: "x".to_owned(),
        dtype: skep_wire::Dtype::F32,
        shape: vec![ELEMENTS],
        role: Role::trainable(),
    }])?;
    let hive = TestHive::start()?;
    // So many contributions to a version that none is completed here: this measures the way of the
    // bytes into the sum, not the optimiser.
    let policy = serde_json::json!({ "kind": "batch", "size": 1_000_000 });
    hive.create("push", &schema, 1 << 16, policy)?;
    let client = hive.client()?;
    let gradient = Arc::new(Layout::of_gradient(&schema, Encoding::F32)?);
    let body = Bytes::from_owner(Frame::zeros(gradient));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let plain = Plain::start()?;

    let (mut pushes, mut pulls, mut limits_out, mut limits_in) = (vec![], vec![], vec![], vec![]);
    for round in 0..=ROUNDS {
        let (limit_out, limit_in) = plain.round()?;
        let lease = runtime.block_on(client.lease(
            "push",
            &LeaseRequest {
                worker: "bench".to_owned(),
                engine: String::new(),
                seconds_left: None,
                has: vec![],
                only: None,
                kinds: vec![],
                wait: 0.0,
                waiting: 0.0,
            },
        ))?;
        let LeaseAnswer::Lease(lease) = lease else { return Err("no lease".into()) };
        let envelope = Envelope {
            lease: lease.id,
            sequence: 0,
            first: lease.first,
            count: 1,
            base: lease.base,
            kind: ContributionKind::Gradient,
            encoding: Encoding::F32,
            loss: None,
            want: None,
            have: None,
            without: None,
        };
        let start = Instant::now();
        runtime.block_on(client.contribute("push", &envelope, body.clone()))?;
        let push = start.elapsed().as_secs_f64();
        let start = Instant::now();
        let pulled = runtime.block_on(client.parameters("push", None, Encoding::F32))?;
        let pull = start.elapsed().as_secs_f64();
        if pulled.bytes().len() < BYTES {
            return Err("the pull was short".into());
        }
        // The first round warms caches and allocators up on both sides.
        if round > 0 {
            pushes.push(push);
            pulls.push(pull);
            limits_out.push(limit_out);
            limits_in.push(limit_in);
        }
    }
    let speed = |seconds: f64| format!("{:.2} GB/s", BYTES as f64 / seconds / 1e9);
    let row = |what, ours: &mut [f64], limit: &mut [f64]| {
        let (ours, limit) = (median(ours), median(limit));
        Row::new(
            what,
            speed(ours),
            format!("TCP {}", speed(limit)),
            limit / ours,
            Target::AtLeast(0.6),
        )
    };
    Ok(vec![
        row("push of 64 MiB", &mut pushes, &mut limits_out),
        row("pull of 64 MiB", &mut pulls, &mut limits_in),
    ])
}

/// Two plain sockets: one takes 64 MiB and answers a byte, one gives 64 MiB when asked.
struct Plain {
    address: std::net::SocketAddr,
    buffer: Vec<u8>,
}

impl Plain {
    fn start() -> Result<Self, Failure> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let address = listener.local_addr()?;
        std::thread::spawn(move || {
            let mut buffer = vec![1u8; BYTES];
            for stream in listener.incoming() {
                let Ok(mut stream) = stream else { return };
                let mut wish = [0];
                while stream.read_exact(&mut wish).is_ok() {
                    let done = if wish[0] == b'>' {
                        stream.read_exact(&mut buffer).and_then(|()| stream.write_all(b"."))
                    } else {
                        stream.write_all(&buffer)
                    };
                    if done.is_err() {
                        break;
                    }
                }
            }
        });
        Ok(Self { address, buffer: vec![1; BYTES] })
    }

    /// Seconds to send and to receive.
    fn round(&self) -> Result<(f64, f64), Failure> {
        let mut stream = TcpStream::connect(self.address)?;
        stream.set_nodelay(true)?;
        let start = Instant::now();
        stream.write_all(b">")?;
        stream.write_all(&self.buffer)?;
        stream.read_exact(&mut [0])?;
        let out = start.elapsed().as_secs_f64();
        // A fresh buffer, as a pull has.
        let start = Instant::now();
        stream.write_all(b"<")?;
        let mut fresh = vec![0u8; BYTES];
        stream.read_exact(&mut fresh)?;
        Ok((out, start.elapsed().as_secs_f64()))
    }
}
