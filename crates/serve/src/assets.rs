//! What a model needs besides its parameters: found beside its file, or fetched from a hive. Only
//! its task knows what it is.

use std::path::PathBuf;

use skep_data::shard_hash;
use skep_learn::{Assets, Task};
use skep_wire::Manifest;
use skep_worker::Client;

use crate::ServeError;

/// An asset may have so many bytes.
const MOST_BYTES: u64 = 64 << 20;

/// The assets that a task names: those that are known, the others from the first folder that has
/// them.
pub(crate) fn complete(
    mut known: Assets,
    folders: &[PathBuf],
    task: &dyn Task,
) -> Result<Assets, ServeError> {
    for &name in task.assets() {
        if known.contains_key(name) {
            continue;
        }
        let places: Vec<_> = folders.iter().map(|folder| folder.join(name)).collect();
        let Some(path) = places.iter().find(|path| path.is_file()) else {
            let looked: Vec<_> = places.iter().map(|path| path.display().to_string()).collect();
            let looked = match looked.is_empty() {
                true => "its run does not have it".to_owned(),
                false => format!("looked for {}", looked.join(", ")),
            };
            return Err(missing(task, name, &looked));
        };
        let fail = |error| ServeError::System(format!("{}: {error}", path.display()));
        let length = std::fs::metadata(path).map_err(fail)?.len();
        if length > MOST_BYTES {
            return Err(too_large(name, length));
        }
        known.insert(name.to_owned(), std::fs::read(path).map_err(fail)?);
    }
    Ok(known)
}

/// The assets of a run of a hive.
pub async fn of_run(client: &Client, run: &str, manifest: &Manifest) -> Result<Assets, ServeError> {
    let mut assets = Assets::new();
    for asset in &manifest.assets {
        let name = &asset.name;
        if asset.bytes > MOST_BYTES {
            return Err(too_large(name, asset.bytes));
        }
        let bytes = client.shard(run, &asset.hash).await?;
        let bytes = bytes.as_ref();
        if shard_hash(bytes) != asset.hash {
            let what = format!("the hive's `{name}` is not what the run's manifest names");
            return Err(ServeError::System(what));
        }
        assets.insert(name.clone(), bytes.to_vec());
    }
    Ok(assets)
}

fn missing(task: &dyn Task, name: &str, where_not: &str) -> ServeError {
    ServeError::model(
        format!("a model of the kind `{}` needs `{name}`: {where_not}", task.name()),
        "it lies in the folder `assets` of the run that trained the model: copy it beside the file",
    )
}

fn too_large(name: &str, bytes: u64) -> ServeError {
    ServeError::model(
        format!("`{name}` has {bytes} bytes"),
        format!("at most {MOST_BYTES} are read"),
    )
}
