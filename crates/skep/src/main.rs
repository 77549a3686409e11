//! The `skep` binary: the facade's command line with the tasks that come with Skep.

use std::process::ExitCode;

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    skep::main(skep::tasks())
}
