//! DeepSpeed's recorded runs, through the library and through the program.

use std::path::PathBuf;
use std::process::{Command, Output};

use anyhow::{Context, Result, ensure};
use candle_core::Device;
use polarshard_muon::Precision;
use polarshard_testkit::golden::{Error, Golden};
use polarshard_testkit::replay::replay;
use safetensors::SafeTensors;

const FILES: [&str; 7] = [
    "z1-gram-rs",
    "z2-gram-ar",
    "z2-gram-rs",
    "z2-gram-rs-gas2-overlap",
    "z2-gram-rs-smallbucket",
    "z2-gram-rs-w4",
    "z2-standard-rs",
];

fn file(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
        .join("golden")
        .join(name)
        .with_extension("safetensors")
}

fn program(files: &[PathBuf]) -> Result<Output> {
    Command::new(env!("CARGO_BIN_EXE_golden"))
        .args(files)
        .output()
        .context("the program runs")
}

/// The bytes of a case, changed and written to a folder of its own.
fn changed(
    folder: &tempfile::TempDir,
    change: impl FnOnce(&mut Vec<u8>) -> Result<()>,
) -> Result<PathBuf> {
    let mut bytes = std::fs::read(file("z2-gram-rs"))?;
    change(&mut bytes)?;
    let path = folder.path().join("changed.safetensors");
    std::fs::write(&path, bytes)?;
    Ok(path)
}

/// Replaces a text of the header by one of the same length.
fn replace(bytes: &mut [u8], from: &str, to: &str) -> Result<()> {
    ensure!(from.len() == to.len(), "the header keeps its length");
    let at = bytes
        .windows(from.len())
        .position(|window| window == from.as_bytes())
        .context("no such text")?;
    bytes[at..at + to.len()].copy_from_slice(to.as_bytes());
    Ok(())
}

/// Adds to every element of a tensor.
fn perturb(bytes: &mut [u8], key: &str, by: f32) -> Result<()> {
    let (start, len) = {
        let tensors = SafeTensors::deserialize(bytes)?;
        let data = tensors.tensor(key)?.data();
        (data.as_ptr().addr() - bytes.as_ptr().addr(), data.len())
    };
    for value in bytes[start..start + len].as_chunks_mut().0 {
        *value = (f32::from_le_bytes(*value) + by).to_le_bytes();
    }
    Ok(())
}

#[test]
fn every_case_is_within_its_tolerance() -> Result<()> {
    for name in FILES {
        let golden = Golden::read(file(name))?;
        ensure!(
            golden.gradients.len() == 3 && golden.initial.len() == 12,
            "{name} is incomplete"
        );
        let replay = replay(&golden, &Device::Cpu, Precision::Auto)?;
        ensure!(replay.is_faithful(), "{name}: {replay:?}");
        let (muon, adamw) = (
            replay.muon.context("no Muon parameter")?,
            replay.adamw.context("no AdamW parameter")?,
        );
        // DeepSpeed rounds to half precision, so that nothing at all would mean that nothing was compared.
        ensure!(
            muon.error > 1e-4 && adamw.error > 1e-9,
            "{name}: {muon:?}, {adamw:?}"
        );
    }
    Ok(())
}

#[test]
fn the_program_accepts_the_cases() -> Result<()> {
    let output = program(&FILES.map(file))?;
    let text = String::from_utf8(output.stdout)?;
    ensure!(output.status.code() == Some(0), "{text}");
    ensure!(
        text.matches("  muon  error").count() == 7 && text.matches("  adamw error").count() == 7,
        "{text}"
    );
    Ok(())
}

#[test]
fn the_program_refuses_another_result() -> Result<()> {
    let folder = tempfile::tempdir()?;
    for (key, by) in [
        ("after/1/blocks.0.up.weight", 1e-4),
        ("after/2/lm_head.weight", 1e-6),
        ("after/0/conv.weight", 1e-4),
        ("after/0/lm_head.weight", f32::INFINITY),
        ("init/blocks.0.up.weight", f32::NEG_INFINITY),
        ("after/1/conv.weight", f32::NAN),
    ] {
        let path = changed(&folder, |bytes| perturb(bytes, key, by))?;
        let output = program(&[path, file("z1-gram-rs")])?;
        let text = String::from_utf8(output.stdout)?;
        let name = key.rsplit('/').next().context("a name")?;
        ensure!(
            output.status.code() == Some(1) && text.contains("OVER") && text.contains(name),
            "{key}: {text}"
        );
    }
    Ok(())
}

#[test]
fn the_program_refuses_another_layout() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let owners = r#"\"0\": [[0], [0], [0, 1], [1]"#;
    let path = changed(&folder, |bytes| {
        replace(bytes, owners, r#"\"0\": [[0], [0], [1, 0], [0]"#)
    })?;
    let output = program(&[path])?;
    let text = String::from_utf8(output.stdout)?;
    ensure!(output.status.code() == Some(1), "{text}");
    ensure!(
        text.contains("`blocks.1.down.weight` is owned by [1], in DeepSpeed by [0]"),
        "{text}"
    );
    Ok(())
}

#[test]
fn the_program_says_what_it_cannot_read() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let garbage = folder.path().join("garbage.safetensors");
    std::fs::write(&garbage, "not at all")?;
    let missing = folder.path().join("missing.safetensors");
    for (path, part) in [
        (garbage, "not a safetensors file"),
        (missing, "missing.safetensors"),
    ] {
        let output = program(&[path, file("z2-gram-rs")])?;
        let text = String::from_utf8(output.stderr)?;
        ensure!(
            output.status.code() == Some(2) && text.contains(part),
            "{text}"
        );
    }
    Ok(())
}

#[test]
fn what_is_not_reproduced_is_refused_by_name() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let cases = [
        (r#"\"clip\": 0.0"#, r#"\"clip\": 1.0"#, "`clip` is 1"),
        (r#"\"scale\": 1.0"#, r#"\"scale\": 8.0"#, "`scale` is 8"),
        (r#"\"fp32\""#, r#"\"fp16\""#, "`dtype` is fp16"),
        (r#"\"stage\": 2"#, r#"\"stage\": 3"#, "`stage` is 3"),
        (r#"\"ns\": \"gram\""#, r#"\"ns\": \"gran\""#, "`ns` is gran"),
        (r#"\"gas\": 1"#, r#"\"gas\": 0"#, "`gas` is 0"),
        (r#"\"world\": 2"#, r#"\"world\": 0"#, "`world` is 0"),
        (r#"\"steps\": 3"#, r#"\"steps\": 0"#, "`steps` is 0"),
        (
            r#"\"multi\""#,
            r#"\"malti\""#,
            "metadata `case` is not as it should be: missing field `multi`",
        ),
        (
            r#""partition_size""#,
            r#""partition_syze""#,
            "there is no metadata `partition_size`",
        ),
        ("[6240, 1008]", "[6240 , 100]", "within"),
        (
            "init/conv.weight",
            "inix/conv.weight",
            "there is no tensor `init/conv.weight`",
        ),
        (
            "grad/1/0/1/conv.weight",
            "grad/1/0/7/conv.weight",
            "there is no tensor `grad/1/0/1/conv.weight`",
        ),
        (
            "after/2/conv.weight",
            "after/9/conv.weight",
            "there is no tensor `after/2/conv.weight`",
        ),
    ];
    for (from, to, message) in cases {
        let path = changed(&folder, |bytes| replace(bytes, from, to))?;
        match Golden::read(&path) {
            Err(error) => {
                let text = format!("{:#}", anyhow::Error::from(error));
                ensure!(
                    text.contains(message) && text.contains("changed.safetensors"),
                    "{text}"
                );
            }
            // A wrong shard length can be read; the replay tells.
            Ok(golden) => ensure!(
                message == "within"
                    && !replay(&golden, &Device::Cpu, Precision::Auto)?.is_faithful(),
                "{to} was accepted"
            ),
        }
    }
    Ok(())
}

#[test]
fn tensors_of_another_kind_are_refused_by_name() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let path = changed(&folder, |bytes| {
        let text = r#""init/blocks.1.tiny.weight":{"dtype":"F32","shape":[5,3]"#;
        replace(bytes, text, &text.replace("[5,3]", "[3,5]"))
    })?;
    let error = Golden::read(&path).err().context("the shapes differ")?;
    ensure!(
        matches!(&error, Error::Shape { found, expected, .. } if found == &[5, 3] && expected == &[3, 5]),
        "{error}"
    );
    let path = changed(&folder, |bytes| {
        let text = r#""init/blocks.1.tiny.weight":{"dtype":"F32""#;
        replace(bytes, text, &text.replace("F32", "I32"))
    })?;
    let error = Golden::read(&path).err().context("the dtype differs")?;
    ensure!(
        matches!(&error, Error::Dtype { key, .. } if key == "init/blocks.1.tiny.weight"),
        "{error}"
    );
    Ok(())
}
