//! Where things are kept: a folder now, a bucket later, through the `object_store` crate alone.
//!
//! Two kinds of writes are all that the rest is built on: `put` replaces an object as a whole and
//! `create` makes one that was not there; both are on disk when they return. In a folder an object
//! is first written beside its place under a name ending in `#` and a number, then renamed or
//! linked. A process that is killed can leave such a staging file behind; it is never listed or
//! read as an object.

use std::fmt;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use bytes::Bytes;
use futures::{StreamExt, TryStreamExt};
use object_store::local::LocalFileSystem;
use object_store::path::Path as ObjectPath;
use object_store::{ObjectStore, ObjectStoreExt, PutMode};
use url::Url;

use crate::DataError;

/// A place for objects. Clones share it.
#[derive(Clone)]
pub struct Store {
    objects: Arc<dyn ObjectStore>,
    /// The folder, where it is one: people look there, and deletes are made durable there.
    folder: Option<Arc<PathBuf>>,
    url: Arc<str>,
}

impl Store {
    /// Opens a folder, given as a path or a `file://` address. It is created if it is not there.
    pub fn open(text: &str) -> Result<Self, DataError> {
        let refuse = |reason: String| DataError::Location { text: text.to_owned(), reason };
        let path = match text.split_once("://") {
            Some(("file", _)) => Url::parse(text)
                .ok()
                .and_then(|url| url.to_file_path().ok())
                .ok_or_else(|| refuse("a file address looks like file:///var/skep".to_owned()))?,
            Some((scheme, _)) => {
                return Err(refuse(format!(
                    "this binary has no `{scheme}://` stores; give a folder or a file:// address"
                )));
            }
            None if text.is_empty() => return Err(refuse("give a folder".to_owned())),
            None => PathBuf::from(text),
        };
        if path.exists() && !path.is_dir() {
            return Err(refuse("it is a file; give a folder".to_owned()));
        }
        create_folder(&path).map_err(|error| {
            match DataError::of_io(&path.to_string_lossy(), error) {
                DataError::Store { source, .. } => refuse(format!("{source}; give a folder")),
                other => other,
            }
        })?;
        let folder = std::fs::canonicalize(&path)
            .map_err(|error| DataError::of_io(&path.to_string_lossy(), error))?;
        let url = Url::from_directory_path(&folder)
            .map_err(|()| refuse("its path cannot be written as an address".to_owned()))?;
        let objects = LocalFileSystem::new_with_prefix(&folder)
            .map_err(|error| DataError::of_store(text, error))?
            .with_fsync(true)
            .with_automatic_cleanup(true);
        Ok(Self {
            objects: Arc::new(objects),
            folder: Some(Arc::new(folder)),
            url: url.as_str().into(),
        })
    }

    /// Any object store: one in memory, a bucket, one that fails on purpose.
    pub fn with(objects: Arc<dyn ObjectStore>) -> Self {
        let url = objects.to_string().into();
        Self { objects, folder: None, url }
    }

    /// The object store below: to wrap it, or to ask it for what is not here.
    pub fn objects(&self) -> &Arc<dyn ObjectStore> {
        &self.objects
    }

    /// The address, for people.
    pub fn url(&self) -> String {
        self.url.to_string()
    }

    /// Where a person finds an object, if the store is a folder.
    pub fn local_path(&self, path: &str) -> Option<PathBuf> {
        let folder = self.folder.as_deref()?;
        let path = ObjectPath::parse(path).ok()?;
        Some(path.parts().fold(folder.clone(), |folder, part| folder.join(part.as_ref())))
    }

    /// Writes an object, replacing one that is there: readers see the old or the new one.
    pub async fn put(&self, path: &str, bytes: Bytes) -> Result<(), DataError> {
        self.write(path, bytes, PutMode::Overwrite).await
    }

    /// Writes an object that must not be there yet: [`DataError::Exists`] otherwise. Of several
    /// who try at once, one succeeds.
    pub async fn create(&self, path: &str, bytes: Bytes) -> Result<(), DataError> {
        self.write(path, bytes, PutMode::Create).await
    }

    async fn write(&self, path: &str, bytes: Bytes, mode: PutMode) -> Result<(), DataError> {
        let object = parse(path)?;
        self.objects
            .put_opts(&object, bytes.into(), mode.into())
            .await
            .map(|_| ())
            .map_err(|error| DataError::of_store(path, error))
    }

    /// Reads an object.
    pub async fn get(&self, path: &str) -> Result<Bytes, DataError> {
        let object = parse(path)?;
        let found = self.objects.get(&object).await;
        let found = found.map_err(|error| DataError::of_store(path, error))?;
        found.bytes().await.map_err(|error| DataError::of_store(path, error))
    }

    /// Reads a part of an object; all of the range must be there.
    pub async fn get_range(&self, path: &str, range: Range<u64>) -> Result<Bytes, DataError> {
        let size =
            self.size(path).await?.ok_or_else(|| DataError::NotFound { path: path.to_owned() })?;
        if range.start > range.end || range.end > size {
            return Err(DataError::Path {
                path: path.to_owned(),
                reason: format!("bytes {}..{} of {size} were asked for", range.start, range.end),
            });
        }
        if range.is_empty() {
            return Ok(Bytes::new());
        }
        let length = range.end - range.start;
        let bytes = self
            .objects
            .get_range(&parse(path)?, range)
            .await
            .map_err(|error| DataError::of_store(path, error))?;
        if bytes.len() as u64 != length {
            return Err(DataError::damaged(path, "it became shorter while it was read"));
        }
        Ok(bytes)
    }

    /// How many bytes an object has; nothing if it is not there.
    pub async fn size(&self, path: &str) -> Result<Option<u64>, DataError> {
        match self.objects.head(&parse(path)?).await {
            Ok(meta) => Ok(Some(meta.size)),
            Err(object_store::Error::NotFound { .. }) => Ok(None),
            Err(error) => Err(DataError::of_store(path, error)),
        }
    }

    /// Whether an object is there.
    pub async fn exists(&self, path: &str) -> Result<bool, DataError> {
        Ok(self.size(path).await?.is_some())
    }

    /// The paths of all objects below a prefix (a folder's path, or empty for all), sorted. They
    /// start at the store, as [`Store::get`] takes them.
    pub async fn list(&self, prefix: &str) -> Result<Vec<String>, DataError> {
        let folder = parse_prefix(prefix)?;
        let mut paths: Vec<String> = self
            .objects
            .list(folder.as_ref())
            .map_ok(|meta| meta.location.to_string())
            .try_collect()
            .await
            .map_err(|error| DataError::of_store(prefix, error))?;
        paths.sort_unstable();
        Ok(paths)
    }

    /// The names of the folders directly below a prefix, sorted. A folder may turn out to hold no
    /// object: a write to it may have been cut short.
    pub async fn list_folders(&self, prefix: &str) -> Result<Vec<String>, DataError> {
        let folder = parse_prefix(prefix)?;
        let found = self
            .objects
            .list_with_delimiter(folder.as_ref())
            .await
            .map_err(|error| DataError::of_store(prefix, error))?;
        let name = |path: &ObjectPath| path.filename().map(str::to_owned);
        let mut names: Vec<String> = found.common_prefixes.iter().filter_map(name).collect();
        names.sort_unstable();
        Ok(names)
    }

    /// Deletes an object. It is no error if it was not there.
    pub async fn delete(&self, path: &str) -> Result<(), DataError> {
        match self.objects.delete(&parse(path)?).await {
            Ok(()) => self.sync_folder_of(path).await,
            Err(object_store::Error::NotFound { .. }) => Ok(()),
            Err(error) => Err(DataError::of_store(path, error)),
        }
    }

    /// Deletes all objects below a folder's path, and what killed processes left there.
    pub async fn delete_all(&self, prefix: &str) -> Result<(), DataError> {
        // An empty prefix would be the whole store: no caller means that.
        let folder = parse(prefix)?;
        let objects: Vec<_> = self
            .objects
            .list(Some(&folder))
            .map_ok(|meta| meta.location)
            .try_collect()
            .await
            .map_err(|error| DataError::of_store(prefix, error))?;
        let objects = futures::stream::iter(objects.into_iter().map(Ok)).boxed();
        let mut deleted = self.objects.delete_stream(objects);
        while let Some(result) = deleted.next().await {
            match result {
                Ok(_) | Err(object_store::Error::NotFound { .. }) => {}
                Err(error) => return Err(DataError::of_store(prefix, error)),
            }
        }
        if let Some(local) = self.local_path(prefix) {
            let removed = blocking(move || std::fs::remove_dir_all(local)).await;
            match removed {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    return Err(DataError::of_io(prefix, error));
                }
                _ => self.sync_folder_of(prefix).await?,
            }
        }
        Ok(())
    }

    /// `object_store` makes writes durable, but not deletes; "the manifest goes first" would mean
    /// nothing if a power cut could bring it back after its files.
    async fn sync_folder_of(&self, path: &str) -> Result<(), DataError> {
        let Some(mut folder) = self.local_path(path) else { return Ok(()) };
        folder.pop();
        match blocking(move || sync_folder(&folder)).await {
            // Not found: the folder was empty and is gone too.
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(DataError::of_io(path, error))
            }
            _ => Ok(()),
        }
    }
}

impl fmt::Debug for Store {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Store({})", self.url)
    }
}

fn parse(path: &str) -> Result<ObjectPath, DataError> {
    let refuse = |reason: String| DataError::Path { path: path.to_owned(), reason };
    if path.is_empty() {
        return Err(refuse("it is empty".to_owned()));
    }
    if path.starts_with('/') || path.ends_with('/') {
        return Err(refuse("it starts or ends with `/`".to_owned()));
    }
    ObjectPath::parse(path).map_err(|error| refuse(error.to_string()))
}

fn parse_prefix(prefix: &str) -> Result<Option<ObjectPath>, DataError> {
    if prefix.is_empty() { Ok(None) } else { parse(prefix).map(Some) }
}

/// Runs file work off the async threads.
async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> std::io::Result<T> + Send + 'static,
) -> std::io::Result<T> {
    tokio::task::spawn_blocking(work).await.map_err(std::io::Error::other)?
}

/// Creates a folder and those above it, and makes the new entries durable.
fn create_folder(path: &Path) -> std::io::Result<()> {
    let made: Vec<&Path> = path
        .ancestors()
        .take_while(|path| !path.as_os_str().is_empty() && !path.exists())
        .collect();
    std::fs::create_dir_all(path)?;
    for folder in made {
        let above = folder.parent().filter(|above| !above.as_os_str().is_empty());
        sync_folder(above.unwrap_or(Path::new(".")))?;
    }
    Ok(())
}

fn sync_folder(path: &Path) -> std::io::Result<()> {
    // Folders can be opened and synced on Unix only.
    if cfg!(unix) { std::fs::File::open(path)?.sync_all() } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use object_store::memory::InMemory;

    use super::*;

    async fn conforms(store: &Store) {
        store.put("a/one", "1".into()).await.expect("writes");
        store.put("a/one", "22".into()).await.expect("overwrites");
        assert_eq!(store.get("a/one").await.expect("reads"), "22");
        store.create("a/b/two", "2".into()).await.expect("creates");
        let again = store.create("a/b/two", "3".into()).await;
        assert!(matches!(again, Err(DataError::Exists { path }) if path == "a/b/two"));
        assert_eq!(store.get("a/b/two").await.expect("reads"), "2", "the first one stays");
        assert_eq!(store.size("a/one").await.expect("asks"), Some(2));
        assert_eq!(store.size("a/none").await.expect("asks"), None);
        assert!(matches!(store.get("a/none").await, Err(DataError::NotFound { .. })));
        assert_eq!(store.list("a").await.expect("lists"), ["a/b/two", "a/one"]);
        assert_eq!(store.list("").await.expect("lists"), ["a/b/two", "a/one"]);
        assert!(store.list("nowhere").await.expect("lists").is_empty());
        assert_eq!(store.list_folders("a").await.expect("lists"), ["b"]);
        assert!(store.list_folders("nowhere").await.expect("lists").is_empty());
        assert_eq!(store.get_range("a/one", 1..2).await.expect("reads"), "2");
        assert_eq!(store.get_range("a/one", 2..2).await.expect("reads"), "");
        for range in [1..3, 3..3, 7..9, 0..u64::MAX] {
            assert!(store.get_range("a/one", range.clone()).await.is_err(), "{range:?}");
        }
        store.delete("a/one").await.expect("deletes");
        store.delete("a/one").await.expect("is idempotent");
        store.delete_all("a").await.expect("deletes");
        assert!(store.list("").await.expect("lists").is_empty());
        for bad in ["", "/a", "a/", "a//b", "../a", "a/../b", "."] {
            assert!(store.put(bad, Bytes::new()).await.is_err(), "{bad:?} was taken");
        }
        assert!(store.delete_all("").await.is_err(), "nobody empties a store by accident");
    }

    #[tokio::test]
    async fn a_folder_and_memory_behave_alike() {
        let folder = tempfile::tempdir().expect("a folder");
        let deep = folder.path().join("made/on demand");
        conforms(&Store::open(&deep.to_string_lossy()).expect("opens")).await;
        conforms(&Store::with(Arc::new(InMemory::new()))).await;
    }

    #[tokio::test]
    async fn a_file_address_is_a_folder_and_people_find_files() {
        let folder = tempfile::tempdir().expect("a folder");
        let root = folder.path().canonicalize().expect("is there").join("a b");
        let url = Url::from_directory_path(&root).expect("absolute").to_string();
        let store = Store::open(&url).expect("opens");
        assert_eq!(store.url(), url);
        store.put("x/y", "1".into()).await.expect("writes");
        let path = store.local_path("x/y").expect("is local");
        assert_eq!(path, root.join("x").join("y"));
        assert_eq!(std::fs::read(path).expect("is there"), b"1");
    }

    #[test]
    fn what_is_no_store_is_refused_with_a_reason() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        let file = file.path().to_string_lossy().into_owned();
        for bad in ["", "s3://bucket/x", "gs://bucket", "file://host/x", file.as_str()] {
            let error = Store::open(bad).expect_err(bad).to_string();
            assert!(error.contains(bad), "{error}");
        }
        let error = Store::open("s3://bucket/x").expect_err("no s3").to_string();
        assert!(error.contains("`s3://`") && error.contains("folder"), "{error}");
    }

    #[tokio::test]
    async fn staging_files_of_the_killed_are_never_objects() {
        let folder = tempfile::tempdir().expect("a folder");
        let store = Store::open(&folder.path().to_string_lossy()).expect("opens");
        store.put("a/one", "whole".into()).await.expect("writes");
        // What a process killed in the middle of `put` and `create` leaves behind.
        std::fs::write(folder.path().join("a/one#1"), b"ha").expect("writes");
        std::fs::write(folder.path().join("a/two#1"), b"ha").expect("writes");
        assert_eq!(store.list("").await.expect("lists"), ["a/one"]);
        assert_eq!(store.size("a/two").await.expect("asks"), None);
        assert!(store.get("a/one#1").await.is_err());
        store.put("a/one", "new".into()).await.expect("they are in nobody's way");
        store.create("a/two", "new".into()).await.expect("they are in nobody's way");
        assert_eq!(store.get("a/two").await.expect("reads"), "new");
        store.delete_all("a").await.expect("deletes");
        assert!(!folder.path().join("a").exists(), "leftovers go with the folder");
    }

    #[tokio::test]
    async fn errors_name_the_path_and_say_what_to_do() {
        let folder = tempfile::tempdir().expect("a folder");
        let store = Store::open(&folder.path().to_string_lossy()).expect("opens");
        let kinds = [
            (std::io::ErrorKind::StorageFull, "no space left to write `x/y`; free some"),
            (std::io::ErrorKind::PermissionDenied, "no permission for `x/y`; check its owner"),
            (std::io::ErrorKind::TimedOut, "the store failed at `x/y`"),
        ];
        for (kind, start) in kinds {
            let source = Box::new(std::io::Error::from(kind));
            let error = object_store::Error::Generic { store: "local", source };
            let error = DataError::of_store("x/y", error);
            assert!(error.to_string().starts_with(start), "{error}");
            assert!(std::error::Error::source(&error).is_some(), "the cause is kept");
        }
        let error = store.get("x/y").await.expect_err("is not there");
        assert_eq!(error.to_string(), "`x/y` is not there");
    }
}
