//! The `skep` binary: the facade's command line with the tasks that come with Skep.

use std::process::ExitCode;

// musl's own allocator is slow; glibc's is good, and gives memory back sooner than mimalloc.
#[cfg(target_env = "musl")]
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    skep::main(skep::tasks())
}
