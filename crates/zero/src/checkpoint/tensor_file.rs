//! safetensors files of f32 tensors, written tensor by tensor and read span by span.

use std::fs::File;
use std::io::{BufWriter, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use polarshard_partition::Span;
use safetensors::Dtype;
use safetensors::tensor::{Metadata, TensorInfo};

use super::durable;
use crate::error::{Error, Result};

const BYTES: usize = 4;

/// Writes a file beside its final name, and renames it when it is whole.
#[derive(Debug)]
pub(super) struct TensorFileWriter {
    path: PathBuf,
    beside: PathBuf,
    out: BufWriter<File>,
}

impl TensorFileWriter {
    /// Begins a file of these tensors, whose values are then appended in this order.
    pub(super) fn create(path: PathBuf, tensors: &[(String, Vec<usize>)]) -> Result<Self> {
        let mut end = 0;
        let infos = tensors
            .iter()
            .map(|(name, shape)| {
                let start = end;
                end += BYTES * shape.iter().product::<usize>();
                let info = TensorInfo {
                    dtype: Dtype::F32,
                    shape: shape.clone(),
                    data_offsets: (start, end),
                };
                (name.clone(), info)
            })
            .collect();
        let metadata =
            Metadata::new(None, infos).map_err(|error| Error::checkpoint(&path, error))?;
        let mut header =
            serde_json::to_vec(&metadata).map_err(|error| Error::checkpoint(&path, error))?;
        // The format wants the values to begin at a multiple of 8.
        header.resize(header.len().next_multiple_of(8), b' ');
        let beside = durable::beside(&path);
        let file = File::create(&beside).map_err(|error| Error::checkpoint(&beside, error))?;
        let mut writer = Self {
            path,
            beside,
            out: BufWriter::new(file),
        };
        writer.bytes(&(header.len() as u64).to_le_bytes())?;
        writer.bytes(&header)?;
        Ok(writer)
    }

    /// Appends values of a tensor. What is not finite is refused: nobody could go on from it, and the checkpoint that it
    /// would replace may be the last good one.
    pub(super) fn append(&mut self, name: &str, values: &[f32]) -> Result<()> {
        check_finite(&self.path, name, values)?;
        values
            .iter()
            .try_for_each(|value| self.bytes(&value.to_le_bytes()))
    }

    /// Makes the file durable under its final name.
    pub(super) fn finish(self) -> Result<()> {
        let file = self
            .out
            .into_inner()
            .map_err(|error| Error::checkpoint(&self.beside, error.into_error()))?;
        durable::rename(&file, &self.beside, &self.path)
    }

    fn bytes(&mut self, bytes: &[u8]) -> Result<()> {
        self.out
            .write_all(bytes)
            .map_err(|error| Error::checkpoint(&self.beside, error))
    }
}

/// Reads spans of the tensors of one file.
#[derive(Debug)]
pub(super) struct TensorFileReader {
    path: PathBuf,
    file: File,
    metadata: Metadata,
    values_at: u64,
}

impl TensorFileReader {
    pub(super) fn open(path: &Path) -> Result<Self> {
        let failed = |error: std::io::Error| Error::checkpoint(path, error);
        let mut file = File::open(path).map_err(failed)?;
        let mut len = [0; 8];
        file.read_exact(&mut len).map_err(failed)?;
        let len = u64::from_le_bytes(len);
        let size = file.metadata().map_err(failed)?.len();
        if len.saturating_add(8) > size {
            let reason = format!("its header claims {len} bytes, the file has {size}");
            return Err(Error::checkpoint(path, std::io::Error::other(reason)));
        }
        let mut header = vec![0; len as usize];
        file.read_exact(&mut header).map_err(failed)?;
        let metadata =
            serde_json::from_slice(&header).map_err(|error| Error::checkpoint(path, error))?;
        Ok(Self {
            path: path.to_path_buf(),
            file,
            metadata,
            values_at: 8 + len,
        })
    }

    /// Whether it has a tensor of this name.
    pub(super) fn has(&self, name: &str) -> bool {
        self.metadata.info(name).is_some()
    }

    /// The shape of an f32 tensor.
    pub(super) fn shape(&self, name: &str) -> Result<&[usize]> {
        match self.metadata.info(name) {
            Some(info) if info.dtype == Dtype::F32 => Ok(&info.shape),
            _ => Err(Error::checkpoint(
                &self.path,
                std::io::Error::other(format!("it has no f32 tensor `{name}`")),
            )),
        }
    }

    pub(super) fn read(&mut self, name: &str, span: Span) -> Result<Vec<f32>> {
        self.shape(name)?;
        let tensor = self
            .metadata
            .info(name)
            .map_or(0, |info| info.data_offsets.0);
        let at = self.values_at + (tensor + BYTES * span.start) as u64;
        let failed = |error: std::io::Error| Error::checkpoint(&self.path, error);
        let mut bytes = vec![0; BYTES * span.len()];
        self.file.seek(SeekFrom::Start(at)).map_err(failed)?;
        self.file.read_exact(&mut bytes).map_err(failed)?;
        let values = bytes.as_chunks().0.iter();
        let values: Vec<_> = values.map(|value| f32::from_le_bytes(*value)).collect();
        check_finite(&self.path, name, &values)?;
        Ok(values)
    }
}

fn check_finite(path: &Path, name: &str, values: &[f32]) -> Result<()> {
    let not_finite = values.iter().filter(|value| !value.is_finite()).count();
    if not_finite == 0 {
        return Ok(());
    }
    let reason = format!("{not_finite} elements of `{name}` are not finite");
    Err(Error::checkpoint(path, std::io::Error::other(reason)))
}
