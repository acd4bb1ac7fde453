# Corrects what compilers get wrong in files of llama.cpp, without a line in them. Builds without our patches have it too.
#
#   cmake -DCMAKE_PROJECT_llama.cpp_INCLUDE=<this file> ...        attach.cmake includes it
#
# A property of a source file belongs to the folder of its target, which does not exist yet: so it is set at the end. All CPU
# variants (GGML_CPU_ALL_VARIANTS) have it.

set(SPARQ_COMPILERS_DIR ${CMAKE_CURRENT_LIST_DIR})

function(sparq_compilers)
    if (MSVC)
        return()
    endif()
    set(header ${SPARQ_COMPILERS_DIR}/amx-config.h)
    set_source_files_properties(${CMAKE_SOURCE_DIR}/ggml/src/ggml-cpu/amx/mmq.cpp DIRECTORY ${CMAKE_SOURCE_DIR}/ggml/src
        PROPERTIES COMPILE_OPTIONS "-include;${header}")
endfunction()

cmake_language(DEFER DIRECTORY ${CMAKE_SOURCE_DIR} CALL sparq_compilers)
