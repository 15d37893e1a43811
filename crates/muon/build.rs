//! Under the feature `cuda`, compiles `kernels/*.cu` to PTX for `src/cuda/kernels.rs` to include, and
//! `kernels/hopper/*.cu` to cubins for `src/cuda/hopper`.

use std::env;
use std::error::Error;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// What PTX is made for where `CUDA_COMPUTE_CAP` does not say: later devices run it too.
const DEFAULT_CAPABILITY: &str = "80";
/// The kernels of `kernels/hopper` run on no other devices. A cubin is loaded as it is, where PTX
/// would be translated for some seconds at each start.
const HOPPER: &str = "sm_90a";

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo::rerun-if-changed=build.rs");
    if env::var_os("CARGO_FEATURE_CUDA").is_none() {
        return Ok(());
    }
    println!("cargo::rerun-if-changed=kernels");
    for variable in ["CUDA_HOME", "CUDA_PATH", "CUDA_COMPUTE_CAP"] {
        println!("cargo::rerun-if-env-changed={variable}");
    }
    let (nvcc, architecture) = (nvcc(), architecture()?);
    let out = PathBuf::from(env::var("OUT_DIR")?);
    compile_all(&nvcc, "kernels", "ptx", &architecture, &out)?;
    compile_all(&nvcc, "kernels/hopper", "cubin", HOPPER, &out)
}

/// Compiles the `.cu` files of a folder to what nvcc calls `ptx` or `cubin`.
fn compile_all(
    nvcc: &Path,
    folder: &str,
    kind: &str,
    architecture: &str,
    out: &Path,
) -> Result<(), Box<dyn Error>> {
    for entry in fs::read_dir(folder)? {
        let source = entry?.path();
        if source
            .extension()
            .is_some_and(|extension| extension == "cu")
        {
            compile(nvcc, kind, architecture, &source, out)?;
        }
    }
    Ok(())
}

fn compile(
    nvcc: &Path,
    kind: &str,
    architecture: &str,
    source: &Path,
    out: &Path,
) -> Result<(), String> {
    let name = source.with_extension(kind);
    let output = Command::new(nvcc)
        .arg(format!("-{kind}"))
        .args(["-O3", "-std=c++17", "-arch", architecture, "-o"])
        .arg(out.join(name.file_name().unwrap_or_default()))
        .arg(source)
        .output()
        .map_err(|error| {
            format!(
                "the feature `cuda` needs nvcc: {} cannot be run ({error}); install the CUDA \
                 toolkit, and set CUDA_HOME or PATH to it",
                nvcc.display()
            )
        })?;
    if output.status.success() {
        return Ok(());
    }
    let text = String::from_utf8_lossy(&output.stderr);
    Err(format!("{} does not compile:\n{text}", source.display()))
}

fn nvcc() -> PathBuf {
    let home = env::var_os("CUDA_HOME").or_else(|| env::var_os("CUDA_PATH"));
    home.map_or_else(
        || PathBuf::from("nvcc"),
        |home| Path::new(&home).join("bin").join("nvcc"),
    )
}

/// Hopper has instructions of its own, which only its `a` architecture has.
fn architecture() -> Result<String, String> {
    let capability = match env::var("CUDA_COMPUTE_CAP") {
        Ok(capability) => capability.replace('.', ""),
        Err(_) => DEFAULT_CAPABILITY.to_owned(),
    };
    if capability.parse::<u32>().is_err() {
        return Err(format!(
            "CUDA_COMPUTE_CAP = {capability:?} must be a compute capability, such as 80 or 90"
        ));
    }
    let suffix = if capability == "90" { "a" } else { "" };
    Ok(format!("compute_{capability}{suffix}"))
}
