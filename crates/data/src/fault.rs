//! A store that fails on purpose, so that tests can kill a writer between any two writes or fill
//! its disk.

use std::fmt;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use futures::StreamExt;
use futures::stream::BoxStream;
use object_store::path::Path;
use object_store::{
    CopyOptions, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore,
    ObjectStoreExt, PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
};

use crate::Store;

/// How writes fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fault {
    /// Writes and deletes fail and leave nothing, as if the writer had been killed before.
    KilledBefore,
    /// The first one that fails is carried out, but reported as failed, as if the writer had been
    /// killed just after.
    KilledAfter,
    /// Writes fail since the disk is full; deletes succeed.
    DiskFull,
}

/// A store whose writes fail after a number of them. Reads always succeed.
#[derive(Debug)]
pub struct Faults {
    inner: Arc<dyn ObjectStore>,
    plan: Arc<Plan>,
}

#[derive(Debug)]
struct Plan {
    fault: Fault,
    writes: AtomicU64,
    allowed: AtomicU64,
}

/// What an operation is to do.
enum Verdict {
    Do,
    DoAndFail,
    Fail,
}

impl Faults {
    /// Wraps a store: `allowed` writes and deletes succeed, then `fault` happens for ever.
    pub fn new(store: &Store, fault: Fault, allowed: u64) -> Arc<Self> {
        Arc::new(Self {
            inner: store.objects().clone(),
            plan: Arc::new(Plan {
                fault,
                writes: AtomicU64::new(0),
                allowed: AtomicU64::new(allowed),
            }),
        })
    }

    /// The store to hand to the code under test.
    pub fn store(self: &Arc<Self>) -> Store {
        Store::with(self.clone())
    }

    /// How many writes and deletes were tried.
    pub fn writes(&self) -> u64 {
        self.plan.writes.load(Ordering::SeqCst)
    }

    /// Lets so many writes and deletes succeed, counted from the start; `u64::MAX` heals it.
    pub fn allow(&self, allowed: u64) {
        self.plan.allowed.store(allowed, Ordering::SeqCst);
    }
}

impl Plan {
    fn judge_write(&self) -> Verdict {
        let before = self.writes.fetch_add(1, Ordering::SeqCst);
        let allowed = self.allowed.load(Ordering::SeqCst);
        if before < allowed {
            Verdict::Do
        } else if before == allowed && self.fault == Fault::KilledAfter {
            Verdict::DoAndFail
        } else {
            Verdict::Fail
        }
    }

    fn error(&self) -> object_store::Error {
        let source = match self.fault {
            Fault::DiskFull => io::Error::from(io::ErrorKind::StorageFull),
            _ => io::Error::other("killed"),
        };
        object_store::Error::Generic { store: "faults", source: Box::new(source) }
    }
}

impl fmt::Display for Faults {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Faults({}, {:?})", self.inner, self.plan.fault)
    }
}

type Answer<'call, T> = Pin<Box<dyn Future<Output = Result<T>> + Send + 'call>>;

// Written out as `async_trait` would: it is not worth a dependency of its own.
impl ObjectStore for Faults {
    fn put_opts<'this, 'path, 'call>(
        &'this self,
        location: &'path Path,
        payload: PutPayload,
        options: PutOptions,
    ) -> Answer<'call, PutResult>
    where
        'this: 'call,
        'path: 'call,
        Self: 'call,
    {
        Box::pin(async move {
            match self.plan.judge_write() {
                Verdict::Do => self.inner.put_opts(location, payload, options).await,
                Verdict::DoAndFail => {
                    self.inner.put_opts(location, payload, options).await?;
                    Err(self.plan.error())
                }
                Verdict::Fail => Err(self.plan.error()),
            }
        })
    }

    fn put_multipart_opts<'this, 'path, 'call>(
        &'this self,
        _: &'path Path,
        _: PutMultipartOptions,
    ) -> Answer<'call, Box<dyn MultipartUpload>>
    where
        'this: 'call,
        'path: 'call,
        Self: 'call,
    {
        Box::pin(async move { Err(self.plan.error()) })
    }

    fn get_opts<'this, 'path, 'call>(
        &'this self,
        location: &'path Path,
        options: GetOptions,
    ) -> Answer<'call, GetResult>
    where
        'this: 'call,
        'path: 'call,
        Self: 'call,
    {
        self.inner.get_opts(location, options)
    }

    fn delete_stream(
        &self,
        locations: BoxStream<'static, Result<Path>>,
    ) -> BoxStream<'static, Result<Path>> {
        let (inner, plan) = (self.inner.clone(), self.plan.clone());
        let delete = move |location: Result<Path>| {
            let (inner, plan) = (inner.clone(), plan.clone());
            async move {
                let location = location?;
                let full = plan.fault == Fault::DiskFull;
                match if full { Verdict::Do } else { plan.judge_write() } {
                    Verdict::Do => inner.delete(&location).await?,
                    Verdict::DoAndFail => {
                        inner.delete(&location).await?;
                        return Err(plan.error());
                    }
                    Verdict::Fail => return Err(plan.error()),
                }
                Ok(location)
            }
        };
        locations.then(delete).boxed()
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.inner.list(prefix)
    }

    fn list_with_delimiter<'this, 'path, 'call>(
        &'this self,
        prefix: Option<&'path Path>,
    ) -> Answer<'call, ListResult>
    where
        'this: 'call,
        'path: 'call,
        Self: 'call,
    {
        self.inner.list_with_delimiter(prefix)
    }

    fn copy_opts<'this, 'from, 'to, 'call>(
        &'this self,
        _: &'from Path,
        _: &'to Path,
        _: CopyOptions,
    ) -> Answer<'call, ()>
    where
        'this: 'call,
        'from: 'call,
        'to: 'call,
        Self: 'call,
    {
        Box::pin(async move { Err(self.plan.error()) })
    }
}
